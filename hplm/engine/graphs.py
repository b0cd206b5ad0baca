"""CUDA graphs: the kernels of batches of one shape are recorded once, and then started by one call.

A GPU computes a small batch in less time than a CPU takes to start its kernels one by one. So staging lays batches in few
shapes, and those of one shape differ only in the numbers in two tensors, `Sheet.numbers` and `Sheet.sums`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hplm.adapters.groups import Runs
from hplm.engine.sheets import Sheet
from hplm.model.attention import CUDA_HEADS

log = logging.getLogger(__name__)
MOST = 256  # shapes that are remembered: those that were used last


def can_record(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether there are kernels for adapters, and for attention in heads of this size, that depend on the shape alone."""
    return Runs.takes(device, dtype, [(head, head)]) and head in CUDA_HEADS


@dataclass
class Graph:
    kernels: torch.cuda.CUDAGraph
    numbers: Tensor  # that they read
    rows: int  # that they write


class Graphs:
    """The graphs of an engine. One thread uses them, and one graph runs at a time: all share the memory between kernels."""

    def __init__(self, device: torch.device, most: int = MOST) -> None:
        self._device, self._most = device, most
        self._known: OrderedDict[Hashable, Graph | None] = OrderedDict()  # by shape; None: it was computed once
        self._failed = False
        self._sums = self._hidden = torch.empty(0, 0)  # what all graphs read and write

    def run(self, sheet: Sheet, compute: Callable[[Sheet], Tensor]) -> Tensor:
        """Returns what `compute` returns. The next call overwrites it.

        The first sheet of a shape is computed, because kernels are loaded at their first use. The second one is recorded.
        """
        shape, numbers, sums = sheet.shape, sheet.numbers, sheet.sums
        assert numbers is not None and sums is not None
        self._make_room(max(len(sums), len(sheet.laid.ending[0])), sums)
        is_new = shape not in self._known
        graph = self._known.setdefault(shape, None)
        self._known.move_to_end(shape)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        if graph is None and (is_new or self._failed):
            return compute(sheet)
        sheet.sums = self._sums[: len(sums)].copy_(sums)
        if graph is None:
            try:
                graph = self._known[shape] = self._recorded(sheet, compute)
            except torch.OutOfMemoryError:
                return compute(sheet)  # with the memory that torch keeps for later. The shape may be recorded another time
            except RuntimeError:
                log.exception("kernels cannot be recorded. Answers are right all the same, and take longer")
                self._failed = True
                return compute(sheet)
        for part in sheet.laid.adapters[0]:
            for event in part.arrived:
                event.wait()
        graph.numbers.copy_(numbers)
        graph.kernels.replay()
        return self._hidden[: graph.rows]

    def _make_room(self, rows: int, like: Tensor) -> None:
        if rows > len(self._sums):
            self._known.clear()  # they read and write what is too small now
            self._sums, self._hidden = (like.new_empty(1 << (rows - 1).bit_length(), like.shape[1]) for _ in range(2))

    def _recorded(self, sheet: Sheet, compute: Callable[[Sheet], Tensor]) -> Graph:
        for part in sheet.laid.adapters[0]:
            for event in part.arrived:
                event.synchronize()  # kernels that are recorded can wait for no other stream
        assert sheet.numbers is not None
        hidden = self._hidden[: len(sheet.laid.ending[0])]
        return Graph(self._captured(lambda: hidden.copy_(compute(sheet))), sheet.numbers, len(hidden))

    def _captured(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        kernels, other = torch.cuda.CUDAGraph(), next(filter(None, self._known.values()), None)
        pool = None if other is None else other.kernels.pool()  # memory ends with the last graph that uses it
        with torch.cuda.stream(self._stream):
            kernels.capture_begin(pool, capture_error_mode="thread_local")  # other threads go on
            try:
                run()
            finally:
                kernels.capture_end()
        return kernels

    @cached_property
    def _stream(self) -> torch.cuda.Stream:  # nothing can be recorded in the default one
        return torch.cuda.Stream(self._device)
