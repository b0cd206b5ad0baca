"""Blocks of the cache: a room is as many as its tokens need, wherever they lie. Sequences that begin alike share blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy

from hplm.generation.room import Room


class Blocks:
    """Divides `tokens` places. What is left beyond the last whole block is not used.

    A block that several rooms share is full, so that nobody writes to it. It is free when the last of them is given back.
    """

    def __init__(self, tokens: int, longest: int, block: int) -> None:
        """`longest`: the most tokens that one room must hold. `block`: places of a block."""
        self.block = block
        self.tokens = tokens // block * block
        self.largest = min(self.size_for(longest), self.tokens)
        self._free = list(range(0, self.tokens, block))[::-1]  # their first places; the last is taken next
        self._rooms = dict.fromkeys(self._free, 0)  # how many have the block

    @property
    def free(self) -> int:
        return self.block * len(self._free)

    def size_for(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block

    def take(self, tokens: int) -> Room | None:
        return self.grow(Room((), self.block), tokens)

    def share(self, other: Room, tokens: int) -> Room | None:
        shared = other.starts[: tokens // self.block]
        for start in shared:
            self._rooms[start] += 1
        return Room(shared, self.block) if shared else None

    def grow(self, own: Room, tokens: int) -> Room | None:
        count = (self.size_for(tokens) - own.size) // self.block
        if self.size_for(tokens) > self.largest or count > len(self._free):
            return None
        more = [self._free.pop() for _ in range(count)]
        self._rooms.update(dict.fromkeys(more, 1))
        return Room((*own.starts, *more), self.block)

    def give_back(self, own: Room) -> None:
        for start in own.starts:
            self._rooms[start] -= 1
            if not self._rooms[start]:
                self._free.append(start)

    def freed_by(self, rooms: Sequence[Room]) -> int:
        given = Counter(start for room in rooms for start in room.starts)
        return self.block * sum(count == self._rooms[start] for start, count in given.items())

    def copy(self) -> Blocks:
        other = copy(self)
        other._free, other._rooms = self._free.copy(), self._rooms.copy()
        return other
