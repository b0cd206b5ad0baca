"""Calls the compiled kernel, `kernel.c`: attention of single tokens over cached keys, of all sequences in one call.

It works in 32 bits, on CPUs of x86-64 with AVX2. Elsewhere torch computes one sequence after the other. A test holds both
together.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.compiled import Functions, library, opened, parallel

LIBRARY = library(__file__)
# As in kernel.c:
VERSION = 2  # of its functions
STEP = 16  # numbers of a head are a multiple of it
WORTH = 1 << 16  # multiplications that are worth another thread


class Kernel(Functions):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._attend = self._function("hplm_attend", *(c_void_p,) * 7, c_float, c_int64, c_void_p, c_int64)
        self._parallel = parallel()

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Array, block: int, lengths: Array, head: int
    ) -> Tensor:
        """Returns for each token what it sees: tokens x (heads * head). It sees `lengths` keys.

        `table`: a row for each token with the numbers of the blocks of its keys, which have so many places each; int32.
        """
        if query.stride(1) != 1:
            query = query.contiguous()
        tokens, width = query.shape
        kv_heads = keys.shape[1] // head
        out = query.new_empty(tokens, width)
        heads = kv_heads, width // head // kv_heads, head
        sizes = np.array([query.stride(0), keys.stride(0), tokens, *heads, table.shape[1], block], dtype=np.int64)
        threads = torch.get_num_threads() if int(lengths.sum()) * width >= WORTH else 1
        self._attend(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), table.ctypes.data, lengths.ctypes.data, out.data_ptr(),
            sizes.ctypes.data, head**-0.5, self.instructions, self._parallel, threads,
        )  # fmt: skip
        return out


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "torch attends to cached keys instead, one sequence after the other")


def fits(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return (
        device.type == "cpu"
        and dtype is torch.float32
        and head % STEP == 0
        and (compiled := kernel()) is not None
        and compiled.instructions > 0
    )
