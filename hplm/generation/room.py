"""The room of a sequence's keys and values in the cache, and the space that is divided into such rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from typing_extensions import Self

from hplm.arrays import Array


@dataclass(frozen=True)
class Room:
    """Pieces of equal size, in the order of the sequence's tokens."""

    starts: tuple[int, ...]  # the first place of each piece
    piece: int  # places of a piece

    @property
    def size(self) -> int:
        return self.piece * len(self.starts)

    def place(self, token: int) -> int:
        """Returns where a token is, by its number in the sequence."""
        return self.starts[token // self.piece] + token % self.piece


class Space(Protocol):
    """Divides the places of a cache into rooms: one range for each (`Ranges`), or blocks (`Blocks`)."""

    @property
    def tokens(self) -> int:
        """All places."""
        ...

    @property
    def block(self) -> int:
        """The places of each piece; 0: pieces have different sizes."""
        ...

    @property
    def free(self) -> int:
        """The places that are in no room."""
        ...

    @property
    def largest(self) -> int:
        """The places of the largest room."""
        ...

    def size_for(self, tokens: int) -> int:
        """Returns the size of the smallest room for so many tokens."""
        ...

    def take(self, tokens: int) -> Room | None:
        """Returns a room for so many tokens, or None if there is none."""
        ...

    def share(self, other: Room, tokens: int) -> Room | None:
        """Returns a room with the pieces of another one that hold nothing but its first tokens, or None if none does."""
        ...

    def grow(self, own: Room, tokens: int) -> Room | None:
        """Returns a larger room instead of `own`, or None if there is none; then `own` stays."""
        ...

    def give_back(self, own: Room) -> None: ...

    def freed_by(self, rooms: Sequence[Room]) -> int:
        """Returns how many places would be free if these rooms were given back."""
        ...

    def copy(self) -> Self:
        """Returns a space with the same rooms, to try on it what can be taken."""
        ...


def places_of(rooms: Sequence[Room], first: Array, counts: Array) -> Array:
    """Returns the places of `counts` tokens of each room, from its token `first` on, end to end."""
    tokens = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    starts = np.fromiter(chain.from_iterable(room.starts for room in rooms), dtype=np.int64)
    pieces = np.array([len(room.starts) for room in rooms], dtype=np.int64)
    size = np.repeat(np.array([room.piece for room in rooms], dtype=np.int64), counts)
    return starts[np.repeat(np.cumsum(pieces) - pieces, counts) + tokens // size] + tokens % size
