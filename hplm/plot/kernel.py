"""Calls the compiled kernel, `kernel.c`: a lookup, and the gathering of a batch, in one call each.

It is compiled where hplm is installed and a C compiler is found. Where it is missing, `Chain.lookup_by_arrays` and the codings'
`bags` do the same, several times as slowly. Tests hold both together.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_uint64, c_void_p
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.compiled import library, opened
from hplm.options import TABLE_DTYPES
from hplm.plot.index import Index
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table

log = logging.getLogger(__name__)
LIBRARY = library(__file__)
# As in kernel.c:
VERSION = 1  # of its functions
MOST_WORDS = 5
HIDDEN_STEP = 16
INSTRUCTIONS = ("", "AVX2", "AVX-512")
SHORT = 4096  # tokens of a lookup that takes microseconds
PIECE = 1024  # tokens that are gathered by one thread at least
SUM_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Space(ctypes.Structure):
    _fields_ = (
        ("n", c_int64), ("centre", c_int64), ("words", c_int64), ("levels", c_int64),
        ("word", c_int64 * MOST_WORDS), ("shift", c_int64 * MOST_WORDS),
        ("masks", c_uint64 * (MOST_WORDS * (MOST_WORDS + 1))),
    )  # fmt: skip


class _Link(ctypes.Structure):
    _fields_ = (("starts", c_void_p), ("keys", c_void_p), ("rows", c_void_p), ("bits", c_int64), ("base", c_int64))


class _Rows(ctypes.Structure):
    _fields_ = (("values", c_void_p), ("base", c_int64), ("size", c_int64))


class Kernel:
    def __init__(self, path: Path) -> None:
        others = ctypes.CDLL(str(path))
        others.hplm_instructions.restype = c_int64
        self._lookup, self._long_lookup = ctypes.PyDLL(str(path)).hplm_lookup, others.hplm_lookup
        for lookup in (self._lookup, self._long_lookup):
            lookup.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p)
            lookup.restype = c_int64
        self.instructions = int(others.hplm_instructions())
        self.gather = others.hplm_gather
        self.gather.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, *(c_int64,) * 5, c_void_p, c_int64, c_int64)
        self.gather.restype = c_int64

    def lookup(self, space: int, links: ctypes.Array[_Link], tokens: Array, lengths: Array, found: Array) -> int:
        # A short lookup takes microseconds and keeps the interpreter's lock: to get that back can take milliseconds.
        call = self._lookup if len(tokens) <= SHORT else self._long_lookup
        return call(space, links, len(links), _at(tokens), len(tokens), _at(lengths), len(lengths), _at(found))


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says once which of both."""
    found = opened(LIBRARY, VERSION, Kernel, "numpy and torch look up and gather instead, which takes several times as long")
    if found is not None:
        log.info("the compiled kernel is there")
    return found


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
        tokens, lengths = _whole(tokens), _whole(lengths)
        found = np.empty((2, len(tokens)), dtype=np.int64)
        if self._kernel.lookup(self._space_at, self._links, tokens, lengths, found):
            raise ValueError(f"{len(tokens)} tokens are not those of texts of {lengths} tokens")
        return found[0], found[1]


def can_gather(tables: Sequence[tuple[Table, int]], dtype: torch.dtype) -> bool:
    """Whether the kernel can sum rows of these tables in this type."""
    compiled, meta = kernel(), tables[0][0].meta
    return (
        compiled is not None
        and compiled.instructions > 0
        and dtype in SUM_TYPES
        and meta.hidden % HIDDEN_STEP == 0
        and all(table.meta.dtype == meta.dtype for table, _ in tables)
    )


def gather(tables: Sequence[tuple[Table, int]], addresses: Array, lengths: Array, dtype: torch.dtype) -> Tensor:
    """Returns the sums of packed texts: tokens x hidden. Only where `can_gather`. The tables have all addresses."""
    compiled, meta, window = kernel(), tables[0][0].meta, tables[0][0].space.window
    assert compiled is not None
    addresses, lengths = _whole(addresses), _whole(lengths)
    sums = torch.empty(len(addresses), meta.hidden, dtype=dtype)
    rows = (_Rows * len(tables))(*((table.rows.typed.data_ptr(), base, table.size) for table, base in tables))
    constants = window.centre, window.vectors, meta.hidden, TABLE_DTYPES.index(meta.dtype)

    def gather_piece(piece: tuple[slice, slice]) -> int:
        mine, its_lengths, into = addresses[piece[1]], lengths[piece[0]], sums[piece[1]]
        return compiled.gather(
            rows, len(rows), _at(mine), len(mine), _at(its_lengths), len(its_lengths), *constants,
            into.data_ptr(), SUM_TYPES[dtype], compiled.instructions,
        )  # fmt: skip

    pieces = _pieces(lengths, len(addresses))
    results = map(gather_piece, pieces) if len(pieces) == 1 else _threads().map(gather_piece, pieces)
    if any(list(results)):
        raise ValueError(f"{len(addresses)} addresses are not those of texts of {lengths} tokens, or are in none of the tables")
    return sums


def _pieces(lengths: Array, tokens: int) -> list[tuple[slice, slice]]:
    """Cuts a large batch between texts into a piece for each thread of torch: its texts, and their tokens."""
    count = min(tokens // PIECE, torch.get_num_threads())
    if count < 2:
        return [(slice(None), slice(None))]
    ends = np.cumsum(lengths)
    cuts = np.unique(np.searchsorted(ends, np.linspace(0, tokens, count + 1)[1:-1]) + 1)
    texts = [0, *cuts[cuts < len(lengths)].tolist(), len(lengths)]
    edges = [0, *ends[np.array(texts[1:]) - 1].tolist()]
    return [(slice(*one), slice(*other)) for one, other in zip(pairwise(texts), pairwise(edges), strict=True)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "gather")


def _whole(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, dtype=np.int64)


def _at(numbers: Array) -> int:
    return numbers.ctypes.data
