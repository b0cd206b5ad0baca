"""How a tenant of the task `embed` makes a vector of a text's states. It has no head, and this in its record instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hplm.arrays import Array
from hplm.errors import InvalidInput

MEAN, FIRST = "mean", "first"
FEWEST = 32  # dimensions that a vector learns to be cut to


@dataclass(frozen=True)
class Embedding:
    dimensions: Annotated[int, Meta(ge=1)]  # of its vectors: the first ones of the states
    pooling: Literal["mean", "first"] = MEAN  # of the states of all tokens, or that of the first
    normalised: bool = True  # each vector has the length 1
    shortens: bool = False  # it was trained so that requests may ask for fewer dimensions
    prefixes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # put before a text, by name
    limit: Annotated[int, Meta(ge=8)] | None = None  # tokens that it reads of a text; None: as many as the model takes
    prefix: str = ""  # the name of the one for requests that name none; "": no prefix

    def __post_init__(self) -> None:
        if self.prefix and self.prefix not in self.prefixes:
            raise TypeError(f"an embedding has no prefix {self.prefix!r}, which is its default")

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Embedding:
        """Reads its fields. Raises ValueError if something is missing or wrong."""
        return msgspec.convert(stored, cls)

    def prefixed(self, texts: Sequence[str], name: str | None = None) -> Sequence[str]:
        """Returns texts behind the prefix with this name; None: behind the default, if there is one. Empty ones stay empty."""
        if name and name not in self.prefixes:
            known = f"choose {', '.join(map(repr, self.prefixes))}, or" if self.prefixes else "it has none:"
            raise InvalidInput(f"the tenant has no prefix {name!r}: {known} leave out hplm_prefix")
        chosen = self.prefixes.get(name or self.prefix, "")
        return [chosen + text if text.strip() else text for text in texts] if chosen else texts

    @property
    def sides(self) -> tuple[str, str]:
        """The names of the prefixes of a text that searches for others, and of those that are found."""
        found = [[name for name in names if name in self.prefixes] for names in (("query",), ("passage", "document"))]
        return (*found[0], self.prefix)[0], (*found[1], self.prefix)[0]

    @property
    def sizes(self) -> list[int]:
        """The numbers of dimensions that it learns: all, and halves of them if requests may ask for fewer."""
        found = [self.dimensions]
        while self.shortens and found[-1] >= 2 * FEWEST:
            found.append(found[-1] // 2)
        return found

    def check_asked(self, dimensions: int) -> None:
        """Refuses a number of dimensions that a request may not ask for. 0: it asks for none."""
        if dimensions not in (0, self.dimensions) and not (self.shortens and dimensions < self.dimensions):
            able = f"send 1 to {self.dimensions}" if self.shortens else "it was not trained for others: leave out dimensions"
            raise InvalidInput(f"the tenant's vectors have {self.dimensions} dimensions, not {dimensions}: {able}")


def normalised(vectors: Array) -> Array:
    """Returns vectors, one a row, of the length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
