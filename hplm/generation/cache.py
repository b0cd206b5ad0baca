"""The keys and values of all running sequences, a room for each, and the space that is divided into rooms.

`Ranges` are of sizes that double: a slot of TCB (section 4.2.2) is a range. One of twice the size consists of two that lie side
by side, and a freed one joins its free neighbour again. So every freed range serves the next sequence at once, whatever its
size, and a sequence that grows often stays where it is. `Blocks` lie anywhere, and sequences that begin alike share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.options import AUTO, PAGED, SLOTTED

LEAST = 32  # tokens of the smallest range
BLOCK, CUDA_BLOCK = 32, 256  # tokens of a block; torch's kernel for CUDA takes multiples of 256 only


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


class Ranges:
    """Divides `tokens` places. What is left beyond the last whole range of the smallest size is not used."""

    block = 0  # a room is one piece of any size

    def __init__(self, tokens: int, longest: int) -> None:
        """`longest`: the most tokens that one range must hold."""
        self.largest = min(self.size_for(longest), 1 << (max(tokens, 1).bit_length() - 1))
        self._free: dict[int, set[int]] = {}  # starts, by size
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
        """The places in no room. They may be in several ranges."""
        return sum(size * len(starts) for size, starts in self._free.items())

    @staticmethod
    def size_for(tokens: int) -> int:
        """Returns the size of the smallest room for so many tokens."""
        return max(LEAST, 1 << (tokens - 1).bit_length())

    def take(self, tokens: int) -> Room | None:
        """Returns a room for so many tokens, or None if there is none."""
        wanted = size = self.size_for(tokens)
        while size <= self.largest and not self._free[size]:
            size *= 2
        if size > self.largest:
            return None
        start = min(self._free[size])  # low places first, so that large ranges stay whole
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        return Room((start,), size)

    def share(self, other: Room, tokens: int) -> Room | None:
        """Returns nothing: a range has one owner."""
        return None

    def grow(self, own: Room, tokens: int) -> Room | None:
        """Returns a larger room instead of `own`, or None if there is none; then `own` stays.

        It joins free neighbours if it can: then it contains `own`. Otherwise it is elsewhere, and the caller moves what `own`
        holds before anything else is taken.
        """
        wanted, (start,), size = self.size_for(tokens), own.starts, own.piece
        joined: list[tuple[int, int]] = []
        while size < min(wanted, self.largest) and start ^ size in self._free[size]:
            joined.append((size, start ^ size))
            start, size = start & ~size, 2 * size
        if size == wanted:
            for part, at in joined:
                self._free[part].remove(at)
            return Room((start,), size)
        elsewhere = self.take(tokens)
        if elsewhere is not None:
            self.give_back(own)
        return elsewhere

    def give_back(self, own: Room) -> None:
        (start,), size = own.starts, own.piece
        while size < self.largest and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start, size = start & ~size, 2 * size
        self._free[size].add(start)

    def freed_by(self, rooms: Sequence[Room]) -> int:
        """Returns how many places would be free if these rooms were given back."""
        return sum(room.size for room in rooms)

    def copy(self) -> Ranges:
        """Returns a space with the same rooms, to try on it what can be taken."""
        other = copy(self)
        other._free = {size: starts.copy() for size, starts in self._free.items()}
        return other


class Blocks:
    """The same in blocks. What is left beyond the last whole block is not used.

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
        """Returns a room with the pieces of another one that hold nothing but its first tokens, or None if none does."""
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


Space = Ranges | Blocks


def space_of(kind: str, tokens: int, longest: int, device: torch.device) -> Space:
    """Returns room for `tokens`, divided as `kind` says. `longest`: the most tokens of a sequence."""
    if kind == AUTO:
        kind = PAGED if device.type == "cuda" else SLOTTED
    block = CUDA_BLOCK if device.type == "cuda" else BLOCK
    least = LEAST if kind == SLOTTED else block
    if tokens < least:
        raise InvalidInput(f"a cache of {tokens} tokens holds no sequence: give it at least {least}")
    return Ranges(tokens, longest) if kind == SLOTTED else Blocks(tokens, longest, block)


def least_tokens(kind: str, longest: int) -> int:
    """Returns how many tokens a cache needs for a sequence of `longest` tokens, whatever the device is."""
    ranges, blocks = Ranges.size_for(longest), -(-longest // CUDA_BLOCK) * CUDA_BLOCK
    return {SLOTTED: ranges, PAGED: blocks, AUTO: max(ranges, blocks)}[kind]


def places_of(rooms: Sequence[Room], first: Array, counts: Array) -> Array:
    """Returns the places of `counts` tokens of each room, from its token `first` on, end to end."""
    tokens = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    starts = np.fromiter(chain.from_iterable(room.starts for room in rooms), dtype=np.int64)
    pieces = np.array([len(room.starts) for room in rooms], dtype=np.int64)
    size = np.repeat(np.array([room.piece for room in rooms], dtype=np.int64), counts)
    return starts[np.repeat(np.cumsum(pieces) - pieces, counts) + tokens // size] + tokens % size


class Cache:
    """Memory that a space divides into rooms. The loop's thread owns it."""

    def __init__(self, space: Space, layers: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`width`: of the keys of a token in a layer."""
        self.space = space
        self.device, self.dtype = device, dtype
        self._memory = torch.zeros(layers, 2, space.tokens, width, device=device, dtype=dtype)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and the values of a layer: places x width each."""
        keys, values = self._memory[number]
        return keys, values

    def take(self, tokens: int, like: Room | None = None, alike: int = 0) -> Room | None:
        """Returns a room as `room_in` does. `copy` fills in the rest of the first tokens."""
        return room_in(self.space, tokens, like, alike)

    def grow(self, own: Room, tokens: int, filled: int) -> Room | None:
        """Returns a larger room with the `filled` first tokens of `own`, which is free then. None: there is none.

        If it raises, what `own` held is lost, and its room is free.
        """
        grown = self.space.grow(own, tokens)
        if grown is not None:
            try:
                self.copy(own, grown, filled)
            except BaseException:
                self.space.give_back(grown)
                raise
        return grown

    def give_back(self, own: Room) -> None:
        self.space.give_back(own)

    def copy(self, source: Room, into: Room, tokens: int) -> None:
        """Copies the first tokens of a room into another one, but for the pieces that both have: these come first in both."""
        same = into.piece * sum(one == other for one, other in zip(into.starts, source.starts, strict=False))
        if same < tokens:  # the others are in one piece of each
            start, first, count = source.place(same), into.place(same), tokens - same
            self._memory[:, :, first : first + count].copy_(self._memory[:, :, start : start + count])


def room_in(space: Space, tokens: int, like: Room | None, alike: int) -> Room | None:
    """Returns a room for so many tokens, or None if there is none.

    It may share the pieces of another room that hold nothing but the `alike` first tokens.
    """
    shared = space.share(like, alike) if like is not None else None
    if shared is None:
        return space.take(tokens)
    own = space.grow(shared, tokens)
    if own is None:
        space.give_back(shared)
    return own
