"""Linear maps by the compiled kernel, `kernel.c`: in 32 bits, on CPUs of x86-64 with AVX2.

It reads the weights of a slot where they lie. So it needs no copies of them, no tiles and no padding. A low-rank map with its
biases is one call: what lies between its two products stays in the caches.

Where the kernel is missing, `Tiles` does the same. A test holds both together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.groups import Groups
from hplm.arrays import Array
from hplm.compiled import Functions, library, opened, parallel

CPU = torch.device("cpu")
LIBRARY = library(__file__)
# As in kernel.c:
VERSION = 2  # of its functions
MOST_RANK = 256
STEP = 16  # numbers of outputs are multiples of it
WORTH = 1 << 18  # multiplications that are worth another thread


class _Maps(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("down", "down_bias", "up", "up_bias")),
        *((name, c_int64) for name in ("inputs", "rank", "outputs", "relu", "adds")),
    )


class Kernel(Functions):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        rows = (c_int64, c_void_p) * 2
        self._map = self._function("hplm_map", *(c_void_p,) * 3, *rows, c_int64, c_int64, c_void_p, c_int64)
        self._parallel = parallel()

    def map(self, maps: _Maps, runs: tuple[bytes, bytes, int], x: Tensor, out: Tensor, threads: int) -> None:
        """`runs`: where they begin, with the end of the last one; their slots; how many there are."""
        into = out.data_ptr(), out.stride(0), self.instructions, self._parallel, threads
        self._map(ctypes.byref(maps), *runs, x.data_ptr(), x.stride(0), *into)


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "torch applies adapters instead, which takes up to twice as long")


def fits(device: torch.device, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether the kernel takes weights (outputs x inputs) and biases of these shapes."""
    return (
        device.type == "cpu"
        and dtype is torch.float32
        and all(shape[0] % STEP == 0 for shape in shapes)
        and (compiled := kernel()) is not None
        and compiled.instructions > 0
    )


class InPlace(Groups):
    def __init__(self, slots: Array, device: torch.device = CPU, counts: Array | None = None) -> None:
        bounds = np.arange(len(slots) + 1)
        if counts is not None:
            counts.cumsum(out=bounds[1:])
        self._runs = bounds.tobytes(), slots.astype(np.int64, copy=False).tobytes(), len(slots)

    def spread(self, x: Tensor) -> Tensor:
        return x

    def collect(self, spread: Tensor) -> Tensor:
        return spread

    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = spread.new_empty(spread.shape[0], weight.shape[1])
        self._map(spread, out, _maps(weight, bias), adds=False)
        return out

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._map(spread, base, _maps(weight, bias))

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
        if function not in (None, "relu") or down.shape[1] > MOST_RANK:
            super().add_low_rank(base, spread, down, up, down_bias, up_bias, function)
            return
        maps = _maps(up, up_bias)
        maps.down, maps.down_bias, maps.inputs, maps.relu = _at(down.mT), _at(down_bias), down.shape[2], function is not None
        self._map(spread, base, maps)

    def _map(self, x: Tensor, out: Tensor, maps: _Maps, adds: bool = True) -> None:
        compiled = kernel()
        assert compiled is not None and out.stride(1) == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        maps.adds = adds
        work = x.shape[0] * maps.rank * (maps.inputs + maps.outputs)
        compiled.map(maps, self._runs, x, out, torch.get_num_threads() if work >= WORTH else 1)


def _maps(weight: Tensor, bias: Tensor | None) -> _Maps:
    """Returns one map: slots x outputs x inputs."""
    return _Maps(up=_at(weight.mT), up_bias=_at(bias), rank=weight.shape[2], outputs=weight.shape[1])


def _at(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
