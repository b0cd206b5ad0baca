"""Linear maps by one grouped kernel: one product for each run of rows that share a slot. Runs have any length.

No row is padded. The kernel exists on CUDA for bf16, from Hopper on, and needs rows of a multiple of 16 bytes. Elsewhere torch
replaces it by a loop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from hplm.adapters.groups import Groups
from hplm.arrays import Array, padded
from hplm.model.tensors import sent

ALIGNMENT = 16  # bytes
GENERATIONS = (9, 10)  # major compute capabilities of GPUs that have the kernel
MOST = 1023  # products in one call


def fits(device: torch.device, dtype: torch.dtype, widths: list[int]) -> bool:
    """Whether the device's kernel takes matrices of these widths."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in GENERATIONS
        and all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
    )


class Runs(Groups):
    """Rows stay where they are. Those of one slot should be neighbours: each run reads its weights."""

    def __init__(self, slots: Array, counts: Array, device: torch.device) -> None:
        slots, bounds = slots.astype(np.int64, copy=False), np.append(0, counts.cumsum())
        self._calls = [_call(slots[i : i + MOST], bounds[i : i + MOST + 1], device) for i in range(0, len(slots), MOST)]
        self._slot_of_row = sent(slots.repeat(counts), device)
        self._is_one = len(slots) == 1
        self.is_recordable = len(self._calls) == 1

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._is_one:  # a plain product takes fewer kernels
            ((_, slot, _),) = self._calls
            own = weight.mT.index_select(0, slot)[0]
            return spread @ own if bias is None else torch.addmm(bias.index_select(0, slot)[0], spread, own)
        parts = [grouped_mm(spread[rows], weight.mT.index_select(0, slots), offs=ends) for rows, slots, ends in self._calls]
        mapped = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mapped if bias is None else mapped.add_(bias.index_select(0, self._slot_of_row))


def _call(slots: Array, bounds: Array, device: torch.device) -> tuple[slice, Tensor, Tensor]:
    """Returns the rows of some runs, and for each run its slot and its end. `bounds`: those of the runs.

    Runs without rows behind the last one make their number a power of two: batches of few shapes can be recorded.
    """
    ends, size = (bounds[1:] - bounds[0]).astype(np.int32), min(1 << (len(slots) - 1).bit_length(), MOST)
    rows = slice(int(bounds[0]), int(bounds[-1]))
    return rows, sent(padded(slots, size), device), sent(padded(ends, size), device)
