"""Calls the compiled lookup. Without it `Chain.find_by_arrays` does the same. No torch here: lookup starts without it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p

import numpy as np

from hplm.arrays import Array
from hplm.compiled import Kernel, declared, number_fields, pointer_fields
from hplm.plot.index import Index
from hplm.plot.keys import KeySpace

MOST_WORDS = 5  # as in kernel.c
SHORT = 4096  # tokens of a lookup that takes microseconds


class _Space(ctypes.Structure):
    _fields_ = (
        *number_fields("n", "centre", "words", "levels"),
        ("word", c_int64 * MOST_WORDS), ("shift", c_int64 * MOST_WORDS),
        ("masks", c_uint64 * (MOST_WORDS * (MOST_WORDS + 1))),
    )  # fmt: skip


class _Link(ctypes.Structure):
    _fields_ = *pointer_fields("starts", "keys", "rows"), *number_fields("bits", "base")


_Start = ctypes.c_char * 0  # of a buffer of any size


class Search:
    """Lookups in the tables of one chain."""

    def __init__(self, compiled: Kernel, space: KeySpace, links: Sequence[tuple[Index, int]]) -> None:
        given = c_void_p, *(c_void_p, c_int64) * 3, c_void_p
        self._long = declared(compiled.library.hplm_lookup, *given)
        # A short lookup takes microseconds and keeps the interpreter's lock: to get that back can take milliseconds.
        self._short = declared(compiled.holding.hplm_lookup, *given)
        self._indexes = [index for index, _ in links]  # keeps the mapped files open
        self._links = (_Link * len(links))(*(_Link(*index.pointers(), base) for index, base in links))
        masks = space.masks
        self._space = _Space(space.window.n, space.window.centre, space.words, len(masks))
        for position, (word, shift) in enumerate(space.places):
            self._space.word[position], self._space.shift[position] = word, int(shift)
        self._space.masks[: masks.size] = masks.ravel().tolist()
        self._space_at = ctypes.addressof(self._space)

    def find(self, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """Returns the address of each token, 0 if no table has it, and the places that were tried before."""
        tokens, lengths = as_int64(tokens), as_int64(lengths)
        found = np.empty((2, len(tokens)), dtype=np.int64)
        find, links = self._short if len(tokens) <= SHORT else self._long, self._links
        # Bytes and buffers are passed in less time than numpy takes to say where an array is.
        texts = tokens.tobytes(), len(tokens), lengths.tobytes(), len(lengths)
        if find(self._space_at, links, len(links), *texts, _Start.from_buffer(found.data)):
            raise ValueError(f"{len(tokens)} tokens are not those of texts of {lengths} tokens")
        return found[0], found[1]


def as_int64(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, dtype=np.int64)
