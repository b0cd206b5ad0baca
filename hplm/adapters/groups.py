"""Which slot applies to which rows of a batch, and linear maps over all of them at once.

Rows that share a slot are cut into tiles of equal length, so that one batched product serves every tenant in the batch however
their texts are mixed. A batch of a single slot is one tile and costs no gather.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Groups:
    """Built once a batch from the slot of every row; used in every layer."""

    def __init__(self, slots: np.ndarray, device: torch.device) -> None:
        self.rows = len(slots)
        distinct, counts = np.unique(slots, return_counts=True)
        self._single = int(distinct[0]) if len(distinct) == 1 else None
        if self._single is not None:
            return
        tile = -(-self.rows // len(distinct))  # the mean: short groups pad to it, long ones take several
        order = np.argsort(slots, kind="stable")
        tiles_of = -(-counts // tile)
        first_tile = np.cumsum(tiles_of) - tiles_of
        first_row = np.cumsum(counts) - counts
        within = np.arange(self.rows) - np.repeat(first_row, counts)
        home = np.repeat(first_tile, counts) * tile + within
        take = np.zeros(int(tiles_of.sum()) * tile, dtype=np.int64)  # padding repeats row 0 and is dropped again
        take[home] = order
        back = np.empty(self.rows, dtype=np.int64)
        back[order] = home
        self._slots = torch.from_numpy(np.repeat(distinct, tiles_of).astype(np.int64)).to(device)
        self._take = torch.from_numpy(take).to(device)
        self._back = torch.from_numpy(back).to(device)

    def spread(self, x: Tensor) -> Tensor:
        """rows x d -> tiles x rows of a tile x d"""
        if self._single is not None:
            return x.unsqueeze(0)
        return x.index_select(0, self._take).view(len(self._slots), -1, x.shape[-1])

    def collect(self, tiles: Tensor) -> Tensor:
        if self._single is not None:
            return tiles.squeeze(0)
        return tiles.flatten(0, 1).index_select(0, self._back)

    def pick(self, slots: Tensor) -> Tensor:
        """slots x ... -> tiles x ...: the weights of each tile."""
        if self._single is not None:
            return slots[self._single : self._single + 1]
        return slots.index_select(0, self._slots)


def linear(tiles: Tensor, groups: Groups, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(groups.pick(bias).unsqueeze(1), tiles, groups.pick(weight).mT)
