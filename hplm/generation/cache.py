"""The keys and values of all running sequences, in blocks. Sequences that begin alike share the blocks that both fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array, ranges
from hplm.errors import InvalidInput

BLOCK, CUDA_BLOCK = 32, 256  # tokens of a block; torch's kernel for CUDA takes multiples of 256 only
Blocks = tuple[int, ...]  # the numbers of a sequence's blocks, in the order of its tokens


class Cache:
    """The loop's thread owns it. What is left beyond the last whole block is not used.

    A block that several sequences share is full, so that nobody writes to it. It is free when the last one has given it back.
    """

    def __init__(
        self,
        tokens: int,
        longest: int,
        layers: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        block: int = 0,
    ) -> None:
        """`longest`: the most tokens of a sequence. `width`: of the keys of a token in a layer.

        `block`: tokens of a block; 0: as many as the device's kernel wants.
        """
        self.block = block or (CUDA_BLOCK if device.type == "cuda" else BLOCK)
        count = tokens // self.block
        if not count:
            raise InvalidInput(f"a cache of {tokens} tokens holds no sequence: give it at least {self.block}")
        self.tokens = count * self.block
        self.largest = min(self.size_for(longest), self.tokens)
        self.device, self.dtype = device, dtype
        self._free = list(range(count))[::-1]  # the last is taken next
        self._users = [0] * count  # how many sequences have each block
        self._memory = _zeros((layers, 2, self.tokens, width), device, dtype)

    @property
    def free(self) -> int:
        """The tokens for which there are free blocks."""
        return self.block * len(self._free)

    def size_for(self, tokens: int) -> int:
        """Returns how many tokens the blocks for so many have room for."""
        return -(-tokens // self.block) * self.block

    def size_of(self, blocks: Blocks) -> int:
        """Returns how many tokens these blocks have room for."""
        return self.block * len(blocks)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and the values of a layer: places x width each."""
        keys, values = self._memory[number]
        return keys, values

    def shared(self, like: Blocks, alike: int) -> Blocks:
        """Returns the blocks that hold nothing but the `alike` first tokens of a sequence."""
        return like[: alike // self.block]

    def take(self, tokens: int, like: Blocks = (), alike: int = 0) -> Blocks | None:
        """Returns blocks for so many tokens, or None if there are none.

        They may be those of another sequence that begins with the same `alike` tokens. `copy` fills in the rest of these.
        """
        shared = self.shared(like, alike)
        blocks = self.grow(shared, tokens)
        if blocks is not None:
            for block in shared:
                self._users[block] += 1
        return blocks

    def grow(self, blocks: Blocks, tokens: int) -> Blocks | None:
        """Returns these blocks and others, for so many tokens. None: there are none, and `blocks` stays."""
        count = (self.size_for(tokens) - self.size_of(blocks)) // self.block
        if self.size_for(tokens) > self.largest or count > len(self._free):
            return None
        more = tuple(self._free.pop() for _ in range(count))
        for block in more:
            self._users[block] = 1
        return blocks + more

    def give_back(self, blocks: Blocks) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def freed_by(self, every: Sequence[Blocks]) -> int:
        """Returns for how many tokens more there would be free blocks if these sequences gave theirs back."""
        given = Counter(block for own in every for block in own)
        return self.block * sum(count == self._users[block] for block, count in given.items())

    def copy(self, source: Blocks, into: Blocks, tokens: int) -> None:
        """Copies those of the first tokens of a sequence that are in no block of both: they are in one block of each."""
        same = sum(one == other for one, other in zip(into, source, strict=False))
        count = tokens - same * self.block
        if count > 0:
            start, first = self.block * source[same], self.block * into[same]
            self._memory[:, :, first : first + count].copy_(self._memory[:, :, start : start + count])


def _zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns zeros. A CPU's process gets their memory as it is used."""
    if device.type != "cpu":
        return torch.zeros(*shape, device=device, dtype=dtype)
    memory = mmap(-1, prod(shape) * dtype.itemsize, MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def least_tokens(longest: int) -> int:
    """Returns how many tokens a cache needs for a sequence of `longest` tokens, whatever the device is."""
    return -(-longest // CUDA_BLOCK) * CUDA_BLOCK


def table_of(every: Sequence[Blocks]) -> Array:
    """Returns a row for each sequence with the numbers of its blocks, and zeros behind them."""
    table = np.zeros((len(every), max(map(len, every), default=0)), dtype=np.int32)
    for row, own in zip(table, every, strict=True):
        row[: len(own)] = own
    return table


def places_of(table: Array, block: int, first: Array, counts: Array) -> Array:
    """Returns where `counts` tokens of each row of a table are, from its token `first` on, end to end."""
    tokens = ranges(first, counts)
    own = table[np.repeat(np.arange(len(counts)), counts), tokens // block].astype(np.int64)
    return own * block + tokens % block
