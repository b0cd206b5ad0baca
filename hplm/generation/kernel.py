"""Calls a compiled kernel: attention of single tokens over cached keys, of all sequences in one call.

It works in 32 bits, on CPUs of x86-64 with AVX2. Elsewhere torch computes one sequence after the other.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.compiled import HOW, kernel, number_fields, pointer_fields, vectors

STEP = 16  # numbers of a head are a multiple of it
WORTH = 1 << 16  # multiplications that are worth another thread


class _Cached(ctypes.Structure):
    _fields_ = (
        *HOW, *pointer_fields("query", "keys", "values", "table", "lengths", "out"),
        *number_fields("query_stride", "stride", "tokens", "kv_heads", "group", "head", "most", "block"),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def attend(query: Tensor, keys: Tensor, values: Tensor, table: Array, block: int, lengths: Array, head: int) -> Tensor:
    """Returns for each token what it sees: tokens x (heads * head). It sees `lengths` keys.

    `table`: a row for each token with the numbers of the blocks of its keys, which have so many places each; int32.
    """
    compiled = kernel()
    assert compiled is not None  # it fits
    if query.stride(1) != 1:
        query = query.contiguous()
    tokens, width = query.shape
    kv_heads = keys.shape[1] // head
    out = query.new_empty(tokens, width)
    threads = torch.get_num_threads() if int(lengths.sum()) * width >= WORTH else 1
    cached = _Cached(
        *compiled.how(threads), query.data_ptr(), keys.data_ptr(), values.data_ptr(), table.ctypes.data, lengths.ctypes.data,
        out.data_ptr(), query.stride(0), keys.stride(0), tokens, kv_heads, width // head // kv_heads, head, table.shape[1],
        block, head**-0.5,
    )  # fmt: skip
    compiled.library.hplm_attend_cached(ctypes.byref(cached))
    return out


def fits(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return device.type == "cpu" and dtype is torch.float32 and head % STEP == 0 and vectors() is not None
