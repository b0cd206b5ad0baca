"""A part of work that several machines divide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The share of one machine in work that several machines divide. The first part is number 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def read(cls, given: str) -> Part:
        found = re.fullmatch(r"(\d+)/(\d+)", given)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{given!r}: give I/N, such as 1/8 and so on to 8/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def among(self, things: Sequence[T]) -> list[T]:
        return [*things[self.number - 1 :: self.of]]

    def page(self, name: str) -> str:
        """Returns the name of this part's page."""
        return name if self == WHOLE else name.replace(".html", f"-{self.number}-of-{self.of}.html")


WHOLE = Part()
