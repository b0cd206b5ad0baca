"""The keys and values of all running sequences, a room for each."""

from __future__ import annotations

import torch
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.generation.blocks import Blocks
from hplm.generation.ranges import LEAST, Ranges
from hplm.generation.room import Room, Space
from hplm.options import AUTO, CACHES, PAGED, SLOTTED

EARLY, BATCH = "early", "batch"
CLEANING = (EARLY, BATCH)  # when a finished sequence's room serves another: at once, or when all that run have finished
BLOCK, CUDA_BLOCK = 32, 256  # tokens of a block; torch's kernel for CUDA takes multiples of 256 only


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


def least_tokens(kind: str, longest: int) -> int:
    """Returns how many tokens a cache needs for a sequence of `longest` tokens, whatever the device is."""
    ranges, blocks = Ranges.size_for(longest), -(-longest // CUDA_BLOCK) * CUDA_BLOCK
    return {SLOTTED: ranges, PAGED: blocks, AUTO: max(ranges, blocks)}[kind]


def space_of(kind: str, tokens: int, longest: int, device: torch.device) -> Space:
    """Returns room for `tokens`, divided as `kind` says. `longest`: the most tokens of a sequence."""
    if kind not in CACHES:
        raise InvalidInput(f"unknown cache {kind!r}: choose {', '.join(CACHES)}")
    if kind == AUTO:
        kind = PAGED if device.type == "cuda" else SLOTTED
    block = CUDA_BLOCK if device.type == "cuda" else BLOCK
    least = LEAST if kind == SLOTTED else block
    if tokens < least:
        raise InvalidInput(f"a cache of {tokens} tokens holds no sequence: give it at least {least}")
    return Ranges(tokens, longest) if kind == SLOTTED else Blocks(tokens, longest, block)
