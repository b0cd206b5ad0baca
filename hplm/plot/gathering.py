"""Turns addresses into vectors on the engine's device: for each token the sum over the windows that cover it."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array, joined
from hplm.compiled import declared, number_fields, pointer_fields, vectors
from hplm.errors import Broken
from hplm.model.products import with_rows
from hplm.model.tensors import sent
from hplm.model.windows import Window
from hplm.options import TABLE_DTYPES
from hplm.plot.forest import NULL, Forest
from hplm.plot.index import as_int64
from hplm.plot.keys import apart
from hplm.plot.rows import CODINGS, disk_faults
from hplm.plot.table import Table

log = logging.getLogger(__name__)

FEW = 0.5  # share of the tokens; above it, adding over all tokens is as fast
HIDDEN_STEP = 16  # as in kernel.c
PIECE = 1024  # tokens that are gathered by one thread at least
SUM_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Gatherer:
    """Gathers rows. One thread owns it.

    The first `resident` rows of each table, those of frequent n-grams, are on the device, and are gathered there.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, resident: int = 0) -> None:
        self._device = device
        self._dtype = dtype
        self._resident = resident
        self._tables: list[tuple[Table, int]] = []  # of the last batch
        self._sums: Sums | None = None  # of these; None: the kernel cannot sum them
        self._on_device: weakref.WeakKeyDictionary[Table, Tensor] = weakref.WeakKeyDictionary()

    def broken(self, forest: Forest, addresses: Array) -> Array:
        """Reads the rows into memory, all at once. Returns the addresses of rows that do not match their checksum."""
        tables = forest.tables_of(addresses)
        if len(tables) == 1:
            ((table, base),) = tables
            return table.rows.touch(addresses - base) + base
        bad: list[Array] = []
        for table, base in tables:
            rows = addresses - base
            bad.append(table.rows.touch(rows[(rows >= 0) & (rows < table.size)]) + base)
        return np.concatenate(bad)

    def readable(self, forest: Forest, texts: Sequence[Array], broken: Callable[[int, Broken], None]) -> Sequence[int]:
        """Reads the rows of texts, given by their addresses, into memory. Returns the indexes of texts without a broken row.

        `broken` is called with the indexes of the others.
        """
        bad = self.broken(forest, joined(texts))
        if not len(bad):
            return range(len(texts))
        kept: list[int] = []
        for number, addresses in enumerate(texts):
            wrong = addresses[np.isin(addresses, bad)].tolist()
            if wrong:
                row = forest.name_of(wrong[0])
                broken(number, Broken(f"{row} does not match its checksum: build or copy the table again"))
            else:
                kept.append(number)
        return kept

    def sums(self, forest: Forest, addresses: Array, lengths: Array, size: int | None = None) -> Tensor:
        """Returns the sums of packed texts: tokens x hidden. In each table, rows of other tables count as the null row.

        `size`: of the result, if there are to be zeros behind the last token.
        """
        size = len(addresses) if size is None else size
        tables = forest.tables_of(addresses)
        if tables != self._tables:
            self._tables = tables
            self._sums = Sums(tables, self._dtype) if not self._resident and can_sum(tables, self._dtype) else None
        faults = disk_faults()
        if self._sums is not None:
            total = sent(self._sums.of(addresses, lengths, size, pinned=self._device.type == "cuda"), self._device)
        else:
            total = self._by_torch(tables, addresses, lengths)
        if disk_faults() != faults:
            for table, _ in tables:
                table.rows.count_as_cold()
        return total if size == total.shape[0] else with_rows(total, size)

    def _by_torch(self, tables: Sequence[tuple[Table, int]], addresses: Array, lengths: Array) -> Tensor:
        """Sums what lies in one place after the other: the vectors of each table, on the device and on the host.

        If few tokens have rows there, it sums those tokens only: in a batch of many domains most tokens have none.
        """
        total: Tensor | None = None
        for table, base in tables:
            window, rows = table.meta.window, addresses - base
            if len(tables) > 1:
                rows[(rows < 0) | (rows >= table.size)] = NULL
            for stored, own in self._stored(table, rows):
                index, tokens = bags(own, lengths, window), None
                if len(tables) > 1 or self._resident:
                    found = np.flatnonzero((index >= window.vectors).any(axis=1))  # lower indexes are vectors of the null row
                    if not len(found):
                        continue
                    if len(found) <= FEW * len(index):
                        index, tokens = index[found], sent(found, self._device)
                part = sent(CODINGS[table.meta.dtype].bags(stored, sent(index, stored.device), self._dtype), self._device)
                if tokens is not None:
                    total = part.new_zeros(len(addresses), part.shape[1]) if total is None else total
                    total.index_add_(0, tokens, part)
                else:
                    total = part if total is None else total + part
        if total is None:  # only null rows, which no text has
            total = torch.zeros(len(addresses), tables[0][0].meta.hidden, dtype=self._dtype, device=self._device)
        return total

    def _stored(self, table: Table, rows: Array) -> Iterator[tuple[Tensor, Array]]:
        """Yields the vectors on the device and those on the host, each with the rows to read there."""
        if self._resident:
            resident = self._on_device.get(table)
            if resident is None:
                resident = self._on_device[table] = self._copied(table)
            here = rows < len(resident) // table.meta.window.vectors
            yield resident, np.where(here, rows, NULL)
            rows = np.where(here, NULL, rows)
        yield table.rows.typed, rows

    def _copied(self, table: Table) -> Tensor:
        try:
            return table.rows.copy(min(self._resident, table.size), self._device)
        except torch.OutOfMemoryError:
            log.warning("%s does not fit on %s: its rows are read from the host (lower plot_hot)", table.folder, self._device)
            return table.rows.copy(0, self._device)


def bags(rows: Array, lengths: Array, window: Window) -> Array:
    """Returns for each token the vectors to add: its own position in its window and in those of its neighbours.

    Beyond the ends of a text the null row is taken, whose vectors are zeros. So not even a forged address can reach another
    text.
    """
    if window.vectors == 1:
        return rows[:, None]
    spaced, at = apart(rows, lengths, window.n - 1)
    positions = np.arange(window.n)
    return spaced.take(at[:, None] + (window.centre - positions)) * window.n + positions


class _Rows(ctypes.Structure):
    """The stored rows of a table."""

    _fields_ = *pointer_fields("values"), *number_fields("base", "size")


class Sums:
    """The rows of some tables, ready to be summed by the compiled kernel, which takes their addresses."""

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
