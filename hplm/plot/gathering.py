"""From addresses to vectors: each token's sum over the windows that cover it, on the engine's device."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from hplm.model.windows import Window
from hplm.plot.forest import NULL, Forest
from hplm.plot.table import Table


class Gatherer:
    """Owned by one thread. The `resident` most frequent rows of each table lie on the device and are gathered there."""

    def __init__(self, device: torch.device, dtype: torch.dtype, resident: int = 0) -> None:
        self._device = device
        self._dtype = dtype
        self._resident = resident
        self._on_device: weakref.WeakKeyDictionary[Table, Tensor] = weakref.WeakKeyDictionary()

    def broken(self, forest: Forest, addresses: np.ndarray) -> np.ndarray:
        """Brings the rows into memory, all at once; returns the addresses that do not match their checksum."""
        bad = []
        for table, base in forest.tables_of(addresses):
            rows = addresses - base
            bad.append(table.rows.touch(rows[(rows >= 0) & (rows < table.size)]) + base)
        return np.concatenate(bad)

    def sums(self, forest: Forest, addresses: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Of packed texts: tokens x hidden. One call per table: what lies in another table is the null row there."""
        total: Tensor | None = None
        tables = forest.tables_of(addresses)
        for table, base in tables:
            rows = addresses - base
            if len(tables) > 1:
                rows[(rows < 0) | (rows >= table.size)] = NULL
            for part in self._parts(table, rows, lengths):
                total = part if total is None else total + part
        assert total is not None  # every address lies in some table
        return total

    def _parts(self, table: Table, rows: np.ndarray, lengths: np.ndarray) -> list[Tensor]:
        window = table.meta.window
        if not self._resident:
            index = torch.from_numpy(bags(rows, lengths, window))
            return [table.rows.bags(index, self._dtype).to(self._device)]
        resident = self._on_device.get(table)
        if resident is None:
            resident = self._on_device[table] = table.rows.copy(min(self._resident, table.size), self._device)
        here = rows < len(resident) // window.vectors
        parts = []
        if here.any():
            index = torch.from_numpy(bags(np.where(here, rows, NULL), lengths, window)).to(self._device)
            parts.append(table.meta.coding.bags(resident, index, self._dtype))
        if not here.all():
            index = torch.from_numpy(bags(np.where(here, NULL, rows), lengths, window))
            parts.append(table.rows.bags(index, self._dtype).to(self._device))
        return parts


def bags(rows: np.ndarray, lengths: np.ndarray, window: Window) -> np.ndarray:
    """For each token the vectors to add: its own position in the windows of itself and its neighbours in the same text.

    Where a text ends, the null row is taken, whose vectors are zeros: not even a forged address reaches a neighbour's text.
    """
    if window.vectors == 1:
        return rows[:, None]
    gap, texts = window.n - 1, len(lengths)
    at = np.arange(gap, gap + len(rows))
    if texts > 1:
        at += np.repeat(np.arange(0, gap * texts, gap), lengths)
    padded = np.zeros(len(rows) + gap * (texts + 1), dtype=np.int64)
    padded[at] = rows
    positions = np.arange(window.n)
    return padded.take(at[:, None] + (window.centre - positions)) * window.n + positions
