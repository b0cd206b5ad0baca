"""Options and stores that several commands of the builder read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from builder.tasks.columns import Columns
from hplm.cli.options import AtLeastOne, about, read

if TYPE_CHECKING:
    from builder.store.store import Store


T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The share of a machine in work that several machines divide. The first part is number 1."""

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
SOME_REFUSED = 3  # exit status: some of many were refused, and the others are done. Any error is 1
PART = "I/N: only each N-th of them, from number I on: the share of one of N machines (docs/building.md)"
RAY = "auto, or HOST:PORT: work on the machines of this Ray cluster, which need no shared disk (docs/building.md)"
RayAddress = Annotated[str | None, about(RAY)]
AtOnce = Annotated[
    AtLeastOne | None, about("so many at a time, each in a process with one thread (default: 1, with all threads)")
]
PartOption = Annotated[Part, read(Part.read, help=PART)]
ColumnNames = Annotated[Columns, Parameter(name="*", group="Columns")]


def open_store(folder: Path) -> Store:
    from builder.store.store import Store

    return Store(folder)


def check_picture(picture: Path | None) -> None:
    """Refuses a file that is no picture, before anything is computed for it."""
    if picture is not None:
        from builder.pictures import check_picture

        check_picture(picture)
