"""Keys of n-grams: exact numbers for any window over any vocabulary, without hash collisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hplm.arrays import Array
from hplm.model.windows import Window

WORD = 64


@dataclass(frozen=True)
class KeySpace:
    """Packs a window of id + 1 (0 = absent) into as few uint64 words as its tokens need. Keys are windows x words.

    The first token is in the highest bits of the first word. No token is split between two words.
    """

    vocabulary: int
    window: Window

    @cached_property
    def bits(self) -> int:
        """Bits of one token."""
        return self.vocabulary.bit_length()

    @cached_property
    def words(self) -> int:
        return -(-self.window.n // (WORD // self.bits))

    @cached_property
    def places(self) -> list[tuple[int, np.uint64]]:
        """The word and the shift of each position of the window."""
        # Counted from the end: the first word may hold fewer tokens than the others.
        from_end = [divmod(place, WORD // self.bits) for place in reversed(range(self.window.n))]
        return [(self.words - 1 - word, np.uint64(self.bits * place)) for word, place in from_end]

    def pack(self, windows: Array) -> Array:
        keys = np.zeros((len(windows), self.words), dtype=np.uint64)
        for position, (word, shift) in enumerate(self.places):
            keys[:, word] |= windows[:, position].astype(np.uint64) << shift
        return keys

    def unpack(self, keys: Array) -> Array:
        token = np.uint64((1 << self.bits) - 1)
        columns = [(keys[:, word] >> shift) & token for word, shift in self.places]
        return np.stack(columns, axis=1).astype(np.int64)

    def of(self, tokens: Array, lengths: Array) -> Array:
        """Returns the key of the window of each token of texts that are stored end to end."""
        gap = self.window.n - 1
        spaced, at = apart(tokens.astype(np.uint64) + np.uint64(1), lengths, gap)
        keys = np.zeros((len(spaced) - gap, self.words), dtype=np.uint64)
        for position, (word, shift) in enumerate(self.places):
            keys[:, word] |= spaced[position : position + len(keys)] << shift
        return keys.take(at - self.window.centre, axis=0)

    @cached_property
    def masks(self) -> Array:
        """A mask for each level of the fallback, levels x words: `key & mask` is the key of the shorter window."""
        return self.pack(self.window.levels() * np.uint64((1 << self.bits) - 1))

    def unigrams(self) -> Array:
        """Returns the keys of all single tokens, in order of id."""
        word, shift = self.places[self.window.centre]
        keys = np.zeros((self.vocabulary, self.words), dtype=np.uint64)
        keys[:, word] = np.arange(1, self.vocabulary + 1, dtype=np.uint64) << shift
        return keys


def apart(numbers: Array, lengths: Array, gap: int) -> tuple[Array, Array]:
    """Returns texts with `gap` zeros around each, so that no window sees two of them, and where their numbers are."""
    at = np.arange(gap, gap + len(numbers))
    if len(lengths) > 1:
        at += np.repeat(gap * np.arange(len(lengths)), lengths)
    spaced = np.zeros(len(numbers) + gap * (len(lengths) + 1), dtype=numbers.dtype)
    spaced[at] = numbers
    return spaced, at


def order(keys: Array) -> Array:
    """Returns the indexes that sort keys, by the first word first."""
    if keys.shape[1] == 1:
        return np.argsort(keys[:, 0])
    return np.lexsort(keys.T[::-1])


def first_of_each(keys: Array) -> Array:
    """Returns the indexes of sorted keys at which a new key begins."""
    starts = np.ones(len(keys), dtype=bool)
    np.any(keys[1:] != keys[:-1], axis=1, out=starts[1:])
    return np.flatnonzero(starts)
