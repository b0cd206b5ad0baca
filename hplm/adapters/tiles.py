"""Linear maps by batched products: rows are cut into tiles of equal length, each of one slot.

One product serves all tenants of a batch, however their texts are mixed. If the runs of rows already have equal length, tiles
are views of them. Otherwise rows that share a slot are gathered and padded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.groups import Groups, starts_of_runs
from hplm.arrays import Array
from hplm.model.tensors import sent


class Tiles(Groups):
    def __init__(self, slots: Array, device: torch.device, counts: Array | None = None) -> None:
        slots = slots if counts is None else np.repeat(slots, counts)
        self._take: Tensor | None = None  # gathers rows into tiles, `_back` undoes it; None: tiles are views
        self._back: Tensor | None = None
        starts = starts_of_runs(slots)
        if len(starts) == 1:
            self._tiles, self._first, self._slots = 1, int(slots[0]), None
            return
        tile = int(np.gcd.reduce(np.diff(starts, append=len(slots))))
        distinct, counts = np.unique(slots, return_counts=True)
        mean = -(-len(slots) // len(distinct))  # short groups are padded to it, long groups take several tiles
        tiles_of = -(-counts // mean)
        if len(slots) // tile <= 2 * tiles_of.sum():  # more small products would cost more than gathering
            tile_slots = slots[::tile]
        else:
            tile_slots = np.repeat(distinct, tiles_of)
            self._gather(slots, counts, tiles_of, mean, device)
        self._tiles = len(tile_slots)
        self._first = int(tile_slots[0])
        consecutive = bool((np.diff(tile_slots) == 1).all())  # then their weights need no copy; true for a single tile
        self._slots = None if consecutive else sent(tile_slots.astype(np.int64), device)

    def _gather(self, slots: Array, counts: Array, tiles_of: Array, tile: int, device: torch.device) -> None:
        order = np.argsort(slots, kind="stable")
        first_tile = np.cumsum(tiles_of) - tiles_of
        first_row = np.cumsum(counts) - counts
        within = np.arange(len(slots)) - np.repeat(first_row, counts)
        home = np.repeat(first_tile, counts) * tile + within
        take = np.zeros(int(tiles_of.sum()) * tile, dtype=np.int64)  # padding repeats row 0 and is dropped afterwards
        take[home] = order
        back = np.empty(len(slots), dtype=np.int64)
        back[order] = home
        self._take = sent(take, device)
        self._back = sent(back, device)

    def spread(self, x: Tensor) -> Tensor:
        """Turns rows x d into tiles x rows of a tile x d."""
        if self._take is not None:
            x = x.index_select(0, self._take)
        return x.view(self._tiles, -1, x.shape[1])

    def collect(self, spread: Tensor) -> Tensor:
        rows = spread.flatten(0, 1)
        return rows if self._back is None else rows.index_select(0, self._back)

    def pick(self, slots: Tensor) -> Tensor:
        """Returns the weights of each tile: slots x ... -> tiles x ..."""
        if self._slots is None:
            return slots[self._first : self._first + self._tiles]
        return slots.index_select(0, self._slots)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self.pick(weight.mT)
        return torch.bmm(spread, weight) if bias is None else torch.baddbmm(self.pick(bias).unsqueeze(1), spread, weight)

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if self._take is not None:
            super().add(base, spread, weight, bias)
            return
        own = self.spread(base)
        if bias is not None:
            own.add_(self.pick(bias).unsqueeze(1))
        own.baddbmm_(spread, self.pick(weight.mT))
