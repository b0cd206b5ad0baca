"""Ranges of the cache, in sizes that double: a slot of TCB (section 4.2.2) is a range, the room of one sequence.

A range of twice the size consists of two that lie side by side. A freed range joins its free neighbour again. So every freed
range serves the next sequence at once, whatever its size, and a sequence that grows often stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from hplm.generation.room import Room

LEAST = 32  # tokens of the smallest range


@dataclass(frozen=True, order=True)
class Range:
    start: int
    size: int

    @property
    def room(self) -> Room:
        return Room((self.start,), self.size)

    @classmethod
    def of(cls, room: Room) -> Range:
        (start,) = room.starts
        return cls(start, room.piece)

    @property
    def neighbour(self) -> Range:
        """The range that it joins."""
        return Range(self.start ^ self.size, self.size)

    @property
    def joined(self) -> Range:
        return Range(self.start & ~self.size, 2 * self.size)


class Ranges:
    """Divides `tokens` places. What is left beyond the last whole range of the smallest size is not used."""

    block = 0  # a room is one piece of any size

    def __init__(self, tokens: int, longest: int) -> None:
        """`longest`: the most tokens that one range must hold."""
        self.largest = min(self.size_for(longest), 1 << (max(tokens, 1).bit_length() - 1))
        self._free: dict[int, set[int]] = {}  # starts, by size
        self._taken: set[Range] = set()
        start, size = 0, self.largest
        while size >= LEAST:
            starts = self._free.setdefault(size, set())
            while start + size <= tokens:
                starts.add(start)
                start += size
            size //= 2
        self.tokens = start

    @property
    def free(self) -> int:
        """The places that nobody owns. They may be in several ranges."""
        return sum(size * len(starts) for size, starts in self._free.items())

    @staticmethod
    def size_for(tokens: int) -> int:
        return max(LEAST, 1 << (tokens - 1).bit_length())

    def take(self, tokens: int) -> Room | None:
        wanted = size = self.size_for(tokens)
        while size <= self.largest and not self._free[size]:
            size *= 2
        if size > self.largest:
            return None
        start = min(self._free[size])  # low places first, so that large ranges stay whole
        self._free[size].remove(start)
        return self._keep(start, size, wanted).room

    def share(self, other: Room, tokens: int) -> Room | None:
        return None  # a range has one owner

    def give_back(self, own: Room) -> None:
        freed = Range.of(own)
        self._taken.remove(freed)
        while freed.size < self.largest and freed.neighbour.start in self._free[freed.size]:
            self._free[freed.size].remove(freed.neighbour.start)
            freed = freed.joined
        self._free[freed.size].add(freed.start)

    def freed_by(self, rooms: Sequence[Room]) -> int:
        return sum(room.size for room in rooms)

    def copy(self) -> Ranges:
        other = copy(self)
        other._free, other._taken = {size: starts.copy() for size, starts in self._free.items()}, self._taken.copy()
        return other

    def grow(self, own: Room, tokens: int) -> Room | None:
        """It joins free neighbours if it can: then it contains `own`. Otherwise it is elsewhere.

        The caller moves what `own` holds before anything else is taken.
        """
        wanted, before = self.size_for(tokens), Range.of(own)
        grown = before
        joined: list[Range] = []
        while grown.size < wanted and grown.size < self.largest and grown.neighbour.start in self._free[grown.size]:
            joined.append(grown.neighbour)
            grown = grown.joined
        if grown.size == wanted:
            for part in joined:
                self._free[part.size].remove(part.start)
            self._taken.remove(before)
            self._taken.add(grown)
            return grown.room
        elsewhere = self.take(tokens)
        if elsewhere is not None:
            self.give_back(own)
        return elsewhere

    def _keep(self, start: int, size: int, wanted: int) -> Range:
        """Takes the lower part of a free range, and frees the rest in parts."""
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        kept = Range(start, size)
        self._taken.add(kept)
        return kept
