"""Linear maps by one grouped kernel: a product for each run of rows that share a slot, of whatever length.

No row is padded. The kernel exists on CUDA for bf16 and wants rows of whole 16 bytes; elsewhere torch imitates it by a loop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from hplm.adapters.groups import Groups

ALIGNMENT = 16  # bytes
MANY = 2  # runs for each distinct slot; beyond, sorting rows costs less than reading weights that often


def fits(device: torch.device, dtype: torch.dtype, widths: list[int]) -> bool:
    """Whether the kernel takes matrices of these widths there."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
    )


class Runs(Groups):
    def __init__(self, slots: np.ndarray, device: torch.device) -> None:
        self._take: Tensor | None = None  # rows sorted by slot, and back; None: as they lie
        self._back: Tensor | None = None
        starts = _starts(slots)
        if len(starts) > MANY * len(np.unique(slots)):
            order = np.argsort(slots, kind="stable")
            self._take = torch.from_numpy(order).to(device)
            self._back = torch.from_numpy(np.argsort(order)).to(device)
            slots = slots[order]
            starts = _starts(slots)
        self._slots = torch.from_numpy(slots[starts].astype(np.int64)).to(device)
        self._ends = torch.from_numpy(np.append(starts[1:], len(slots)).astype(np.int32)).to(device)
        self._slot_of_row = torch.from_numpy(slots.astype(np.int64)).to(device)

    def spread(self, x: Tensor) -> Tensor:
        return x if self._take is None else x.index_select(0, self._take)

    def collect(self, spread: Tensor) -> Tensor:
        return spread if self._back is None else spread.index_select(0, self._back)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        mapped = grouped_mm(spread, weight.mT.index_select(0, self._slots), offs=self._ends)
        return mapped if bias is None else mapped.add_(bias.index_select(0, self._slot_of_row))

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        base.add_(self.collect(self.linear(spread, weight, bias)))


def _starts(slots: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
