"""Opens the compiled kernel, `kernel.c`, and calls its lookup. `summing.py` calls its gathering.

It is compiled where hplm is installed and a C compiler is found. Where it is missing, `Chain.lookup_by_arrays` and the codings'
`bags` do the same, several times as slowly. Tests hold both together. No torch here: lookup starts without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.compiled import Functions, library, opened
from hplm.plot.index import Index
from hplm.plot.keys import KeySpace

LIBRARY = library(__file__)
# As in kernel.c:
VERSION = 1  # of its functions
MOST_WORDS = 5
SHORT = 4096  # tokens of a lookup that takes microseconds


class _Space(ctypes.Structure):
    _fields_ = (
        ("n", c_int64), ("centre", c_int64), ("words", c_int64), ("levels", c_int64),
        ("word", c_int64 * MOST_WORDS), ("shift", c_int64 * MOST_WORDS),
        ("masks", c_uint64 * (MOST_WORDS * (MOST_WORDS + 1))),
    )  # fmt: skip


class _Link(ctypes.Structure):
    _fields_ = (("starts", c_void_p), ("keys", c_void_p), ("rows", c_void_p), ("bits", c_int64), ("base", c_int64))


_Start = ctypes.c_char * 0  # of a buffer of any size


class Kernel(Functions):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        lookup = "hplm_lookup", c_void_p, *(c_void_p, c_int64) * 3, c_void_p
        self._long_lookup = self._function(*lookup, result=c_int64)
        self._lookup = self._function(*lookup, result=c_int64, library=ctypes.PyDLL(str(path)))
        places = *(c_void_p, c_int64) * 2, c_void_p, *(c_int64,) * 5
        self.gather = self._function("hplm_gather", *places, c_void_p, c_int64, c_int64, result=c_int64)

    def lookup(self, space: int, links: ctypes.Array[_Link], tokens: Array, lengths: Array, found: Array) -> int:
        # A short lookup takes microseconds and keeps the interpreter's lock: to get that back can take milliseconds.
        call = self._lookup if len(tokens) <= SHORT else self._long_lookup
        # Bytes and buffers are passed in less time than numpy takes to say where an array is.
        into = _Start.from_buffer(found.data)
        return call(space, links, len(links), tokens.tobytes(), len(tokens), lengths.tobytes(), len(lengths), into)


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "numpy and torch look up and gather instead, which takes several times as long")


class Search:
    """Lookups in the tables of one chain."""

    def __init__(self, compiled: Kernel, space: KeySpace, links: Sequence[tuple[Index, int]]) -> None:
        self._kernel = compiled
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
        if self._kernel.lookup(self._space_at, self._links, tokens, lengths, found):
            raise ValueError(f"{len(tokens)} tokens are not those of texts of {lengths} tokens")
        return found[0], found[1]


def as_int64(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, dtype=np.int64)
