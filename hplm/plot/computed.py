"""Rows of windows that no table has: computed by the domain's lower layers as the table would store them, and kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack
from hplm.model.tensors import sent
from hplm.plot.forest import NULL
from hplm.plot.rows import CODINGS
from hplm.plot.table import Table

BATCH = 1024  # the most windows that are computed at once

LowerOf = Callable[[Table], LowerStack | None]  # None: no window of this table is asked for
Missed = tuple[ref[Table], bytes]  # the table of the domain that has not the window, and the window's key


class ComputedRows:
    """One thread owns it. Where all places are taken, the rows that were not used for the longest time go.

    A row is found again only under its own table: a new version of a domain has other lower layers.
    """

    def __init__(
        self, config: BackboneConfig, device: torch.device, dtype: torch.dtype, lower_of: LowerOf, most_bytes: int
    ) -> None:
        room = max(1, most_bytes // (config.hidden * dtype.itemsize))
        self._kept = torch.empty(room, config.hidden, dtype=dtype, device=device)
        self._places: dict[Missed, int] = {}  # the row of each window in `_kept`, the one that was used last at the end
        self._lower_of = lower_of
        self.computed = self.found = 0  # windows that were computed, and those that had been before

    def fill(self, sums: Tensor, addresses: Array, keys: Array, texts: Sequence[tuple[Table, int]]) -> None:
        """Writes the rows of the windows that have the null row. `keys`: of all. `texts`: each one's domain, and its tokens."""
        at = np.flatnonzero(addresses == NULL)
        of: list[int] = np.repeat(np.arange(len(texts)), [count for _, count in texts])[at].tolist()
        windows: list[Missed] = [(ref(texts[text][0]), key.tobytes()) for text, key in zip(of, keys[at], strict=True)]
        for start in range(0, len(at), BATCH):
            part = slice(start, start + BATCH)
            sums.index_copy_(0, sent(at[part], sums.device), self._rows_of(windows[part]))

    def _rows_of(self, windows: Sequence[Missed]) -> Tensor:
        asked = dict.fromkeys(windows)
        kept = [window for window in asked if window in self._places]
        new = [window for window in asked if window not in self._places]
        for window in kept:
            self._places[window] = self._places.pop(window)
        rows = self._kept.index_select(0, self._at(kept))
        if new:
            computed = self._computed(new)
            self._keep(new[-len(self._kept) :], computed[-len(self._kept) :])
            rows = torch.cat([rows, computed])
        self.computed += len(new)
        self.found += len(windows) - len(new)
        order = {window: number for number, window in enumerate([*kept, *new])}
        return rows.index_select(0, sent(np.array([order[window] for window in windows]), rows.device))

    def _keep(self, windows: Sequence[Missed], rows: Tensor) -> None:
        for window in windows:
            full = len(self._places) == len(self._kept)
            self._places[window] = self._places.pop(next(iter(self._places))) if full else len(self._places)
        self._kept.index_copy_(0, self._at(windows), rows)

    def _at(self, windows: Sequence[Missed]) -> Tensor:
        return sent(np.array([self._places[window] for window in windows], dtype=np.int64), self._kept.device)

    @torch.no_grad()
    def _computed(self, windows: Sequence[Missed]) -> Tensor:
        of_table = defaultdict[ref[Table], list[int]](list)
        for number, (table, _) in enumerate(windows):
            of_table[table].append(number)
        rows = torch.empty(len(windows), self._kept.shape[1], dtype=self._kept.dtype)
        for its, numbers in of_table.items():
            table = its()
            assert table is not None  # a text has it
            rows[numbers] = self._by_layers(table, b"".join(windows[number][1] for number in numbers))
        return sent(rows, self._kept.device)

    def _by_layers(self, table: Table, keys: bytes) -> Tensor:
        """Returns what the table would store, in the type of the sums."""
        lower, coding = self._lower_of(table), CODINGS[table.meta.dtype]
        assert lower is not None
        device = lower.words.weight.device
        windows = table.space.unpack(np.frombuffer(keys, dtype=np.uint64).reshape(-1, table.space.words))
        with torch.autocast(device.type, enabled=False):  # tables are computed in 32 bits
            stored = coding.encode(lower(sent(windows, device)).cpu())
        return coding.bags(coding.typed(stored), torch.arange(len(windows))[:, None], self._kept.dtype)
