"""Linear maps over all rows of a batch at once, each row with the weights of its slot: the interface, and batched products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array, ranges
from hplm.model.layer import activation
from hplm.model.tensors import sent


class Map(NamedTuple):
    """A linear map of each slot: slots x outputs x inputs, and slots x outputs."""

    weight: Tensor
    bias: Tensor | None = None


class Groups(ABC):
    """Made once for a batch from the slot of every row, and used in every layer. Weights are slots x outputs x inputs."""

    is_recordable = False  # whether its kernels depend only on the sizes of what it has sent to the device

    @abstractmethod
    def __init__(self, slots: Array, counts: Array, device: torch.device) -> None:
        """`slots`: of each run of rows. `counts`: the rows of each run, at least one."""

    def spread(self, x: Tensor) -> Tensor:
        """Brings rows x d into the order and shape that the maps take."""
        return x

    def collect(self, spread: Tensor) -> Tensor:
        """Brings spread rows back into rows x d."""
        return spread

    @abstractmethod
    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Adds the linear map of spread rows to `base`, in place: large new tensors cost more than small products."""
        base.add_(self.collect(self.linear(spread, weight, bias)))

    def add_low_rank(self, base: Tensor, spread: Tensor, down: Map, up: Map, function: str | None = None) -> None:
        """Adds two linear maps of spread rows to `base`, in place, with a function between them."""
        inner = self.linear(spread, *down)
        self.add(base, inner if function is None else activation(function)(inner), *up)


class Tiles(Groups):
    """Rows are cut into tiles of equal length, each of one slot. One product serves all tenants, however texts are mixed.

    If tiles of some length fit in all runs, they are views. Otherwise rows that share a slot are gathered and padded.
    """

    def __init__(self, slots: Array, counts: Array, device: torch.device) -> None:
        self._take: Tensor | None = None  # gathers rows into tiles, `_back` undoes it; None: tiles are views
        self._back: Tensor | None = None
        if len(slots) == 1:
            self._tiles, self._first, self._slots = 1, int(slots[0]), None
            return
        rows, tile = int(counts.sum()), int(np.gcd.reduce(counts))
        distinct = np.unique(slots)
        rows_of = np.bincount(np.searchsorted(distinct, slots), counts).astype(np.int64)
        mean = -(-rows // len(distinct))  # short groups are padded to it, long groups take several tiles
        tiles_of = -(-rows_of // mean)
        if rows // tile <= 2 * tiles_of.sum():  # more small products would cost more than gathering
            tile_slots = np.repeat(slots, counts // tile)
        else:
            tile_slots = np.repeat(distinct, tiles_of)
            order = np.argsort(np.repeat(slots, counts), kind="stable")
            home = ranges((np.cumsum(tiles_of) - tiles_of) * mean, rows_of)
            take = np.zeros(len(tile_slots) * mean, dtype=np.int64)  # padding repeats row 0 and is dropped afterwards
            take[home] = order
            back = np.empty(rows, dtype=np.int64)
            back[order] = home
            self._take, self._back = sent(take, device), sent(back, device)
        self._tiles = len(tile_slots)
        self._first = int(tile_slots[0])
        consecutive = bool((np.diff(tile_slots) == 1).all())  # then their weights need no copy; true for a single tile
        self._slots = None if consecutive else sent(tile_slots.astype(np.int64), device)

    def spread(self, x: Tensor) -> Tensor:
        """Turns rows x d into tiles x rows of a tile x d."""
        if self._take is not None:
            x = x.index_select(0, self._take)
        return x.view(self._tiles, -1, x.shape[1])

    def collect(self, spread: Tensor) -> Tensor:
        rows = spread.flatten(0, 1)
        return rows if self._back is None else rows.index_select(0, self._back)

    def _pick(self, slots: Tensor) -> Tensor:
        """Returns the weights of each tile: slots x ... -> tiles x ..."""
        if self._slots is None:
            return slots[self._first : self._first + self._tiles]
        return slots.index_select(0, self._slots)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self._pick(weight.mT)
        return torch.bmm(spread, weight) if bias is None else torch.baddbmm(self._pick(bias).unsqueeze(1), spread, weight)

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if self._take is not None:
            super().add(base, spread, weight, bias)
            return
        own = self.spread(base)
        if bias is not None:
            own.add_(self._pick(bias).unsqueeze(1))
        own.baddbmm_(spread, self._pick(weight.mT))
