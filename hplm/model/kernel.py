"""Calls the compiled kernel, `kernel.c`: attention inside packed texts in one call, and tokens rounded to 8 bits in one pass.

Attention needs x86-64 with AVX2. Where the kernel is missing, torch attends to texts, a call for each length, and `EightBit`
rounds by torch, to the same numbers. Tests hold both together.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hplm.compiled import Functions, library, opened, parallel

LIBRARY = library(__file__)
# As in kernel.c:
VERSION = 2  # of its functions
LANES = 16  # numbers of a head are a multiple of it
MOST_KEYS = 1 << 15  # numbers of a head in all tokens of a text, which lie on a thread's stack
TYPES = (torch.float32, torch.bfloat16)
WORTH = 1 << 16  # numbers to round that are worth another thread
WORTH_ATTENDING = 1 << 17  # multiplications that are


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        ("starts", c_char_p), ("out", c_void_p),
        *((name, c_int64) for name in ("heads", "group", "head", "causal")),
    )  # fmt: skip


class Kernel(Functions):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._round = self._function("hplm_round", c_void_p, *(c_int64,) * 3, *(c_void_p,) * 3, c_int64)
        self._attend = self._function("hplm_attend", c_void_p, c_int64, c_int64, c_void_p, c_int64)
        self._parallel = parallel()

    def round(self, x: Tensor, numbers: Tensor, scales: Tensor) -> None:
        """Writes the rounded rows of `x` into `numbers`, which may have more rows, and each row's scale into `scales`."""
        if x.stride(1) != 1:
            x = x.contiguous()
        threads = torch.get_num_threads() if x.numel() >= WORTH else 1
        self._round(x.data_ptr(), *x.shape, x.stride(0), numbers.data_ptr(), scales.data_ptr(), self._parallel, threads)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, starts: bytes, texts: int, heads: int, causal: bool, scores: int
    ) -> Tensor:
        """Computes attention inside packed texts: tokens x (heads * head). Keys and values may have fewer heads.

        It computes in 32 bits, and returns the type that it was given. `starts`: the first token of each text, and the end of
        the last one, as int64. `scores` are those of one head, of all texts.
        """
        dtype, head = query.dtype, query.shape[1] // heads
        query, key, value = [x.float() if x.stride(1) == 1 else x.float().contiguous() for x in (query, key, value)]
        out = query.new_empty(query.shape)
        attention = _Attention(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(0), key.stride(0), value.stride(0),
            starts, out.data_ptr(), heads, query.shape[1] // key.shape[1], head, causal,
        )  # fmt: skip
        threads = torch.get_num_threads() if scores * query.shape[1] >= WORTH_ATTENDING else 1
        self._attend(ctypes.byref(attention), texts, self.instructions, self._parallel, threads)
        return out.to(dtype)


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "torch attends to texts and rounds to 8 bits instead, which takes longer")


def attending(query: Tensor, head: int, longest: int) -> Kernel | None:
    """Returns the kernel if it attends with such queries, in heads of this size, to texts of up to `longest` tokens."""
    if query.device.type != "cpu" or query.dtype not in TYPES or torch.is_grad_enabled():  # it has no backward pass
        return None
    compiled = kernel() if head % LANES == 0 and head * longest <= MOST_KEYS else None
    return compiled if compiled is not None and compiled.instructions > 0 else None
