"""Calls compiled kernels: attention inside packed texts in one call, and tokens rounded to 8 bits in one pass.

Attention needs x86-64 with AVX2. Elsewhere torch attends to texts, a call for each length, and `EightBit` rounds by torch, to
the same numbers.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hplm.compiled import HOW, Kernel, kernel, number_fields, pointer_fields, vectors

# As in kernel.c:
LANES = 16  # numbers of a head are a multiple of it
MOST_KEYS = 1 << 15  # numbers of a head in all tokens of a text, which lie on a thread's stack
TYPES = (torch.float32, torch.bfloat16)
WORTH = 1 << 16  # numbers to round that are worth another thread
WORTH_ATTENDING = 1 << 17  # multiplications that are


class _Rounding(ctypes.Structure):
    _fields_ = (*HOW, *pointer_fields("x", "numbers", "scales"), *number_fields("rows", "inputs", "stride"))


class _Attention(ctypes.Structure):
    _fields_ = (
        *HOW, *pointer_fields("query", "key", "value"), ("starts", ctypes.c_char_p), ("reads", ctypes.c_char_p),
        *pointer_fields("out"), *number_fields("query_stride", "key_stride", "value_stride", "texts", "heads", "head"),
    )  # fmt: skip


def rounded(x: Tensor, into: Tensor) -> Tensor | None:
    """Writes the rounded rows of `x` into `into`, which may have more rows. Returns each row's scale; None: no kernel."""
    compiled = kernel()
    if compiled is None:
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    scales, threads = x.new_empty(len(x), 1), torch.get_num_threads() if x.numel() >= WORTH else 1
    places = x.data_ptr(), into.data_ptr(), scales.data_ptr()
    compiled.library.hplm_round(ctypes.byref(_Rounding(*compiled.how(threads), *places, *x.shape, x.stride(0))))
    return scales


def attending(query: Tensor, head: int, longest: int) -> Kernel | None:
    """Returns the kernel if it attends with such queries, in heads of this size, to texts of up to `longest` tokens."""
    if query.device.type != "cpu" or query.dtype not in TYPES or torch.is_grad_enabled():  # it has no backward pass
        return None
    return vectors() if head % LANES == 0 and head * longest <= MOST_KEYS else None


def attend(
    compiled: Kernel, query: Tensor, key: Tensor, value: Tensor, starts: bytes, heads: int, scores: int, reads: bytes | None
) -> Tensor:
    """Computes attention inside packed texts: tokens x (heads * head).

    It computes in 32 bits, and returns the type that it was given. `starts`: the first token of each text, and the end of the
    last one, as int64. `scores` are those of one head, of all texts. `reads`: how many first tokens of each text attend, as
    int64; the rows of others are anything. None: all.
    """
    dtype, width = query.dtype, query.shape[1]
    query, key, value = [x.float() if x.stride(1) == 1 else x.float().contiguous() for x in (query, key, value)]
    out = query.new_empty(query.shape)
    threads = torch.get_num_threads() if scores * width >= WORTH_ATTENDING else 1
    attention = _Attention(
        *compiled.how(threads), query.data_ptr(), key.data_ptr(), value.data_ptr(), starts, reads, out.data_ptr(),
        query.stride(0), key.stride(0), value.stride(0), len(starts) // 8 - 1, heads, width // heads,
    )  # fmt: skip
    compiled.library.hplm_attend(ctypes.byref(attention))
    return out.to(dtype)
