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

from hplm.adapters.groups import Groups
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
    def __init__(self, slots: Array, device: torch.device = CPU, counts: Array | None = None) -> None:
        bounds = np.arange(len(slots) + 1)
        if counts is not None:
            counts.cumsum(out=bounds[1:])
        self._runs = bounds.tobytes(), slots.astype(np.int64, copy=False).tobytes(), len(slots)

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = spread.new_empty(spread.shape[0], weight.shape[1])
        self._map(spread, out, weight, bias, adds=False)
        return out

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._map(spread, base, weight, bias)

    def add_low_rank(
        self,
        base: Tensor,
        spread: Tensor,
        down: Tensor,
        up: Tensor,
        down_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        function: str | None = None,
    ) -> None:
        if function in (None, "relu") and down.shape[1] <= MOST_RANK:
            self._map(spread, base, up, up_bias, (_at(down.mT), _at(down_bias)), down.shape[2], function is not None)
        else:
            super().add_low_rank(base, spread, down, up, down_bias, up_bias, function)

    def _map(
        self,
        x: Tensor,
        out: Tensor,
        up: Tensor,
        bias: Tensor | None,
        down: tuple[int | None, int | None] = (None, None),
        inputs: int = 0,
        relu: bool = False,
        adds: bool = True,
    ) -> None:
        """Maps by `up`, slots x outputs x inputs. `down`: where the weights of a map before it are, with so many inputs."""
        compiled = kernel()
        assert compiled is not None and out.stride(1) == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        _, outputs, rank = up.shape
        threads = torch.get_num_threads() if x.shape[0] * rank * (inputs + outputs) >= WORTH else 1
        starts, slots, count = self._runs
        maps = _Maps(
            *compiled.how(threads), *down, _at(up.mT), _at(bias), starts, slots, x.data_ptr(), out.data_ptr(),
            inputs, rank, outputs, relu, adds, count, x.stride(0), out.stride(0),
        )  # fmt: skip
        compiled.library.hplm_map(ctypes.byref(maps))


def _at(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
