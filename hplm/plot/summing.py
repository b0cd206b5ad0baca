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
from hplm.options import TABLE_DTYPES
from hplm.plot.kernel import address_of, as_int64, kernel
from hplm.plot.table import Table

HIDDEN_STEP = 16  # as in kernel.c
PIECE = 1024  # tokens that are gathered by one thread at least
SUM_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Rows(ctypes.Structure):
    """The stored rows of a table."""

    _fields_ = (("values", c_void_p), ("base", c_int64), ("size", c_int64))


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
    addresses, lengths = as_int64(addresses), as_int64(lengths)
    sums = torch.empty(len(addresses), meta.hidden, dtype=dtype)
    rows = (_Rows * len(tables))(*((table.rows.typed.data_ptr(), base, table.size) for table, base in tables))
    constants = window.centre, window.vectors, meta.hidden, TABLE_DTYPES.index(meta.dtype)

    def gather_piece(piece: tuple[Array, Array, Tensor]) -> int:
        mine, its_lengths, into = piece
        return compiled.gather(
            rows, len(rows), address_of(mine), len(mine), address_of(its_lengths), len(its_lengths), *constants,
            into.data_ptr(), SUM_TYPES[dtype], compiled.instructions,
        )  # fmt: skip

    cuts = _cuts(lengths, len(addresses))
    pieces = [(addresses[tokens], lengths[texts], sums[tokens]) for texts, tokens in cuts] or [(addresses, lengths, sums)]
    results = map(gather_piece, pieces) if len(pieces) == 1 else _threads().map(gather_piece, pieces)
    if any(list(results)):
        raise ValueError(f"{len(addresses)} addresses are not those of texts of {lengths} tokens, or are in none of the tables")
    return sums


def _cuts(lengths: Array, tokens: int) -> list[tuple[slice, slice]]:
    """Cuts a large batch between texts into a piece for each thread of torch: its texts, and their tokens."""
    count = min(tokens // PIECE, torch.get_num_threads())
    if count < 2:
        return []
    ends = np.cumsum(lengths)
    cuts = np.unique(np.searchsorted(ends, np.linspace(0, tokens, count + 1)[1:-1]) + 1)
    texts = [0, *cuts[cuts < len(lengths)].tolist(), len(lengths)]
    edges = [0, *ends[np.array(texts[1:]) - 1].tolist()]
    return [(slice(*one), slice(*other)) for one, other in zip(pairwise(texts), pairwise(edges), strict=True)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "gather")
