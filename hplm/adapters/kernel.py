"""Linear maps by a compiled kernel: in 32 bits, on CPUs of x86-64 with AVX2.

It reads the weights of a slot where they lie. So it needs no copies of them, no tiles and no padding. A low-rank map with its
biases is one call: what lies between its two products stays in the caches.

Elsewhere `Tiles` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.groups import Groups, Map
from hplm.arrays import Array
from hplm.compiled import HOW, kernel, number_fields, pointer_fields, vectors

CPU = torch.device("cpu")
MOST_RANK = 256  # as in kernel.c
STEP = 16  # numbers of outputs are multiples of it
WORTH = 1 << 18  # multiplications that are worth another thread


class _Maps(ctypes.Structure):
    _fields_ = (
        *HOW, *pointer_fields("down", "down_bias", "up", "up_bias"), ("starts", ctypes.c_char_p), ("slots", ctypes.c_char_p),
        *pointer_fields("x", "out"),
        *number_fields("inputs", "rank", "outputs", "relu", "adds", "count", "x_stride", "out_stride"),
    )  # fmt: skip


def fits(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether the kernel takes weights (outputs x inputs) and biases of these shapes."""
    takes = device.type == "cpu" and dtype is torch.float32 and all(shape[0] % STEP == 0 for shape in shapes)
    return takes and vectors() is not None


class InPlace(Groups):
    def __init__(self, slots: Array, counts: Array, device: torch.device = CPU) -> None:
        self._runs = np.append(0, counts.cumsum()).tobytes(), slots.astype(np.int64, copy=False).tobytes(), len(slots)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = spread.new_empty(spread.shape[0], weight.shape[1])
        self._map(spread, out, Map(weight, bias), adds=False)
        return out

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._map(spread, base, Map(weight, bias))

    def add_low_rank(self, base: Tensor, spread: Tensor, down: Map, up: Map, function: str | None = None) -> None:
        if function in (None, "relu") and down.weight.shape[1] <= MOST_RANK:
            self._map(spread, base, up, down, relu=function is not None)
        else:
            super().add_low_rank(base, spread, down, up, function)

    def _map(self, x: Tensor, out: Tensor, up: Map, down: Map | None = None, relu: bool = False, adds: bool = True) -> None:
        """Maps by `up`, after `down` and a function if there is such a map."""
        compiled = kernel()
        assert compiled is not None and out.stride(1) == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        _, outputs, rank = up.weight.shape
        before, inputs = ((None, None), 0) if down is None else (_at(down), down.weight.shape[2])
        threads = torch.get_num_threads() if x.shape[0] * rank * (inputs + outputs) >= WORTH else 1
        starts, slots, count = self._runs
        maps = _Maps(
            *compiled.how(threads), *before, *_at(up), starts, slots, x.data_ptr(), out.data_ptr(),
            inputs, rank, outputs, relu, adds, count, x.stride(0), out.stride(0),
        )  # fmt: skip
        compiled.library.hplm_map(ctypes.byref(maps))


def _at(own: Map) -> tuple[int, int | None]:
    """Returns where the weights and biases of a map are. Weights lie as inputs x outputs."""
    assert own.weight.mT.is_contiguous() and (own.bias is None or own.bias.is_contiguous())
    return own.weight.data_ptr(), None if own.bias is None else own.bias.data_ptr()
