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
        a_word = WORD // self.bits
        first = self.window.n - a_word * (self.words - 1)  # the first word may hold fewer tokens than the others
        places: list[tuple[int, np.uint64]] = []
        for position in range(self.window.n):
            word, place = (0, position) if position < first else divmod(position - first, a_word)
            word, held = (0, first) if position < first else (word + 1, a_word)
            places.append((word, np.uint64(self.bits * (held - 1 - place))))
        return places

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
        """Returns `pack(window.of(tokens, lengths))`, without making the windows."""
        n, centre = self.window.n, self.window.centre
        gap = n - 1  # absent tokens between two texts, so that no window sees both
        texts = len(lengths)
        at = np.arange(gap, gap + len(tokens))
        if texts > 1:
            at += np.repeat(np.arange(0, gap * texts, gap), lengths) if gap else 0
        padded = np.zeros(len(tokens) + gap * (texts + 1), dtype=np.uint64)
        padded[at] = tokens
        padded[at] += np.uint64(1)
        keys = np.zeros((len(padded) - gap, self.words), dtype=np.uint64)
        for position, (word, shift) in enumerate(self.places):
            keys[:, word] |= padded[position : position + len(keys)] << shift
        return keys.take(at - centre, axis=0)

    @cached_property
    def masks(self) -> Array:
        """A mask for each level of the fallback, levels x words: `key & mask` is the key of the shorter window."""
        token = (1 << self.bits) - 1
        levels = self.window.levels()
        masks = np.zeros((len(levels), self.words), dtype=np.uint64)
        for level, keep in enumerate(levels):
            for position, (word, shift) in enumerate(self.places):
                if keep[position]:
                    masks[level, word] |= np.uint64(token << int(shift))
        return masks

    def unigrams(self) -> Array:
        """Returns the keys of all single tokens, in order of id."""
        word, shift = self.places[self.window.centre]
        keys = np.zeros((self.vocabulary, self.words), dtype=np.uint64)
        keys[:, word] = np.arange(1, self.vocabulary + 1, dtype=np.uint64) << shift
        return keys


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
