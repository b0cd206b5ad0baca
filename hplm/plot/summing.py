"""Sums the stored rows of packed texts by the compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.compiled import declared, number_fields, pointer_fields, vectors
from hplm.options import TABLE_DTYPES
from hplm.plot.kernel import as_int64
from hplm.plot.table import Table

HIDDEN_STEP = 16  # as in kernel.c
PIECE = 1024  # tokens that are gathered by one thread at least
SUM_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Rows(ctypes.Structure):
    """The stored rows of a table."""

    _fields_ = *pointer_fields("values"), *number_fields("base", "size")


class Sums:
    """The rows of some tables, ready to be summed. The kernel takes their addresses."""

    def __init__(self, tables: Sequence[tuple[Table, int]], dtype: torch.dtype) -> None:
        """`tables` are those that `can_sum`, with their bases."""
        compiled, meta, window = vectors(), tables[0][0].meta, tables[0][0].space.window
        assert compiled is not None
        self._tables, self._dtype, self._hidden = tables, dtype, meta.hidden
        places = *(c_void_p, c_int64) * 2, c_void_p, *(c_int64,) * 5
        self._gather = declared(compiled.library.hplm_gather, *places, c_void_p, c_int64, c_int64)
        count = len(tables)
        rows = (_Rows * count)(*((table.rows.typed.data_ptr(), base, table.size) for table, base in tables))
        self._rows = rows, count
        self._window = window.centre, window.vectors, meta.hidden, TABLE_DTYPES.index(meta.dtype)
        self._into = SUM_TYPES[dtype], compiled.instructions

    def of(self, addresses: Array, lengths: Array, rows: int, pinned: bool = False) -> Tensor:
        """Returns the sums of packed texts, and zeros behind them: rows x hidden. The tables have all addresses."""
        addresses, lengths = as_int64(addresses), as_int64(lengths)
        sums = torch.empty(rows, self._hidden, dtype=self._dtype, pin_memory=pinned)
        if rows > len(addresses):
            sums[len(addresses) :] = 0
        if cuts := _cuts(lengths, len(addresses)):
            pieces = [(addresses[tokens], lengths[texts], sums[tokens]) for texts, tokens in cuts]
            failed = any(list(_threads().map(self._sum, *zip(*pieces, strict=True))))
        else:
            failed = self._sum(addresses, lengths, sums)
        if failed:
            raise ValueError(f"{len(addresses)} addresses are not those of texts of {lengths} tokens, or are in no table")
        return sums

    def _sum(self, addresses: Array, lengths: Array, sums: Tensor) -> int:
        mine = addresses.tobytes(), len(addresses), lengths.tobytes(), len(lengths)
        return self._gather(*self._rows, *mine, *self._window, sums.data_ptr(), *self._into)


def can_sum(tables: Sequence[tuple[Table, int]], dtype: torch.dtype) -> bool:
    """Whether the kernel can sum rows of these tables in this type."""
    meta = tables[0][0].meta
    return (
        vectors() is not None
        and dtype in SUM_TYPES
        and meta.hidden % HIDDEN_STEP == 0
        and all(table.meta.dtype == meta.dtype for table, _ in tables)
    )


def _cuts(lengths: Array, tokens: int) -> list[tuple[slice, slice]]:
    """Cuts a large batch between texts into a piece for each thread of torch: its texts, and their tokens. None if small."""
    if tokens < 2 * PIECE or (count := min(tokens // PIECE, torch.get_num_threads())) < 2:
        return []
    ends = np.cumsum(lengths)
    cuts = np.unique(np.searchsorted(ends, np.linspace(0, tokens, count + 1)[1:-1]) + 1)
    texts = [0, *cuts[cuts < len(lengths)].tolist(), len(lengths)]
    edges = [0, *ends[np.array(texts[1:]) - 1].tolist()]
    return [(slice(*one), slice(*other)) for one, other in zip(pairwise(texts), pairwise(edges), strict=True)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "gather")
