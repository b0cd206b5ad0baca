"""Calls the compiled kernel, `kernel.c`: it rounds tokens to 8 bits in one pass over each row.

Where it is missing, `EightBit` rounds by torch, to the same numbers. A test holds both together.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hplm.compiled import library, opened, parallel

LIBRARY = library(__file__)
VERSION = 1  # of its functions, as in kernel.c
WORTH = 1 << 16  # numbers that are worth another thread


class Kernel:
    def __init__(self, path: Path) -> None:
        self._round = ctypes.CDLL(str(path)).hplm_round
        self._round.argtypes = (c_void_p, *(c_int64,) * 3, c_void_p, c_void_p, c_void_p, c_int64)
        self._round.restype = None
        self._parallel = parallel()

    def round(self, x: Tensor, numbers: Tensor, scales: Tensor) -> None:
        """Writes the rounded rows of `x` into `numbers`, which may have more rows, and each row's scale into `scales`."""
        if x.stride(1) != 1:
            x = x.contiguous()
        threads = torch.get_num_threads() if x.numel() >= WORTH else 1
        self._round(x.data_ptr(), *x.shape, x.stride(0), numbers.data_ptr(), scales.data_ptr(), self._parallel, threads)


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "torch rounds to 8 bits instead, which takes longer")
