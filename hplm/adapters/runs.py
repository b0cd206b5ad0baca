"""Linear maps by one grouped kernel: one product for each run of rows that share a slot. Runs have any length.

No row is padded. The kernel exists on CUDA for bf16, from Hopper on, and needs rows of a multiple of 16 bytes. Elsewhere torch
replaces it by a loop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from hplm.adapters.groups import Groups, starts_of_runs
from hplm.arrays import Array, padded
from hplm.model.tensors import sent

ALIGNMENT = 16  # bytes
GENERATIONS = (9, 10)  # major compute capabilities of GPUs that have the kernel
MOST = 1023  # products in one call
MANY = 2  # runs for each distinct slot; above it, sorting rows costs less than reading weights so often


def fits(device: torch.device, dtype: torch.dtype, widths: list[int]) -> bool:
    """Whether the device's kernel takes matrices of these widths."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in GENERATIONS
        and all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
    )


class Runs(Groups):
    """Rows in runs of one slot each, for the grouped kernel. Where slots alternate often, rows are sorted."""

    def __init__(self, slots: Array, device: torch.device, counts: Array | None = None) -> None:
        self._take: Tensor | None = None  # sorts rows by slot, `_back` undoes it; None: rows stay in place
        self._back: Tensor | None = None
        starts = starts_of_runs(slots)
        if len(starts) > MANY and len(starts) > min(MANY * len(np.unique(slots)), MOST):
            slots, counts = slots if counts is None else np.repeat(slots, counts), None
            order = np.argsort(slots, kind="stable")
            self._take = sent(order, device)
            self._back = sent(np.argsort(order), device)
            slots = slots[order]
            starts = starts_of_runs(slots)
        slot_of = slots[starts].astype(np.int64, copy=False)  # of each run
        sizes = np.diff(starts, append=len(slots)) if counts is None else np.add.reduceat(counts, starts)
        bounds = np.append(0, sizes.cumsum())
        self._calls = [_call(slot_of[i : i + MOST], bounds[i : i + MOST + 1], device) for i in range(0, len(slot_of), MOST)]
        self._slot_of_row = sent(slot_of.repeat(sizes), device)
        self._is_one = len(slot_of) == 1
        self.is_recordable = self._take is None and len(self._calls) == 1

    def spread(self, x: Tensor) -> Tensor:
        return x if self._take is None else x.index_select(0, self._take)

    def collect(self, spread: Tensor) -> Tensor:
        return spread if self._back is None else spread.index_select(0, self._back)

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
