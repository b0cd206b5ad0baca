"""Attention over texts that are stored end to end in one tensor of tokens x hidden. No text attends to another."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hplm.arrays import Array, padded
from hplm.compiled import HOW, Kernel, number_fields, pointer_fields, vectors
from hplm.model.tensors import rounded_up, sent

CPU = torch.device("cpu")
CUDA_HEADS = range(8, 257, 8)  # sizes of heads that torch's kernel for CUDA takes
CUDA_DTYPES = (torch.bfloat16, torch.float16)
LEAST_LONGEST = 128  # tokens of the longest text, as the kernel is told where there are to be few shapes
NEAR_ROWS = 256  # of a near layer's queries that torch computes together, which see few keys
# As in kernel.c:
LANES = 16  # numbers of a head are a multiple of it
PIECE = 128  # of a near layer's queries that are computed together
MOST_KEYS = 1 << 15  # numbers of a head in all tokens that are seen together, which lie on a thread's stack
TYPES = (torch.float32, torch.bfloat16)  # that the compiled kernel takes
WORTH = 1 << 17  # multiplications that are worth another thread


class _Attention(ctypes.Structure):
    _fields_ = (
        *HOW, *pointer_fields("query", "key", "value"), ("starts", ctypes.c_char_p), ("reads", ctypes.c_char_p),
        *pointer_fields("out"), *number_fields("query_stride", "key_stride", "value_stride"),
        *number_fields("texts", "heads", "head", "group", "near"),
    )  # fmt: skip


def avoid_plans(device: torch.device) -> None:
    """Keeps torch from cuDNN's attention, which makes a plan for each new number of texts and tokens: tens of milliseconds."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class PackedAttention:
    """Self-attention inside each packed sequence; `lengths` are their tokens. There is no padding and no score between texts.

    One call computes all of them: the compiled kernel's on CPUs where there are no gradients, and torch's on CUDA in 16 bits.
    Elsewhere there is one call for each length, and neighbouring sequences of equal length are computed together.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Array,
        heads: int,
        device: torch.device = CPU,
        compiled: bool = True,
        few_shapes: bool = False,
    ) -> None:
        """`compiled`: use the compiled kernel where it can attend.

        `few_shapes`: on CUDA in 16 bits, the same kernel for any texts, with empty texts behind the last one.
        """
        self.heads = heads
        self._compiled = compiled and not few_shapes
        self.few_shapes = few_shapes
        self._lengths = np.asarray(lengths, dtype=np.int64)
        bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
        self._lengths.cumsum(out=bounds[1:])
        self._starts, self._tokens, self.longest = bounds.tobytes(), int(bounds[-1]), max(self._lengths.tolist(), default=0)
        self._scores = int(self._lengths.dot(self._lengths))
        self._ends: Tensor | None = None
        if few_shapes:
            self.longest = max(LEAST_LONGEST, 1 << (self.longest - 1).bit_length())
            self._ends = sent(padded(bounds.astype(np.int32), rounded_up(len(bounds))), device)
        elif device.type == "cuda" and len(self.runs) > 1:
            self._ends = sent(bounds.astype(np.int32), device)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        return runs_of(self._lengths.tolist())

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, reads: Array | None = None, near: int | None = None
    ) -> Tensor:
        """`reads`: how many first tokens of each text are read. The rows of others, and of further texts, may be anything.

        `near`: how many tokens to each side a token sees; None: its whole text.
        """
        if near is not None and near + 1 >= self.longest:
            near = None
        if (compiled := self.kernel_for(query, near)) is not None:
            return self._attend(compiled, query, key, value, reads, near)
        if len(self.runs) == 1 and not self.few_shapes:
            ((_, count),) = self.runs
            return rows_attend(query, key, value, count, self.heads, near)
        if self._ends is not None and query.dtype in CUDA_DTYPES and query.shape[1] // self.heads in CUDA_HEADS:
            return self._any_length(query, key, value, self._ends, near)
        # Splitting and joining costs one copy in the backward pass. Slicing would cost a whole copy for every run.
        sizes = [length * count for length, count in self.runs]
        queries, keys, values = (x.split_with_sizes(sizes) for x in (query, key, value))
        parts = zip(queries, keys, values, self.runs, strict=True)
        return torch.cat([rows_attend(q, k, v, count, self.heads, near) for q, k, v, (_, count) in parts])

    def kernel_for(self, query: Tensor, near: int | None = None) -> Kernel | None:
        """Returns the compiled kernel if it attends with such queries to texts of these lengths."""
        head, on_cpu = query.shape[1] // self.heads, query.device.type == "cpu"
        if not self._compiled or not on_cpu or query.dtype not in TYPES or torch.is_grad_enabled():  # it has no backward pass
            return None
        seen = self.longest if near is None else min(self.longest, PIECE + 2 * near)
        return vectors() if head % LANES == 0 and head * seen <= MOST_KEYS else None

    def _attend(
        self, compiled: Kernel, query: Tensor, key: Tensor, value: Tensor, reads: Array | None, near: int | None
    ) -> Tensor:
        """Computes in 32 bits, and returns the type that it was given."""
        assert query.shape[0] == self._tokens
        first, scores, lengths = None, self._scores, self._lengths  # of one head, of all texts
        if reads is not None:
            first = reads.astype(np.int64).tobytes() + bytes(8 * (len(lengths) - len(reads)))
            scores = int(lengths[: len(reads)].dot(reads))
        dtype, width = query.dtype, query.shape[1]
        query, key, value = [x.float() if x.stride(1) == 1 else x.float().contiguous() for x in (query, key, value)]
        out = query.new_empty(query.shape)
        attention = _Attention(
            *compiled.how(torch.get_num_threads() if scores * width >= WORTH else 1),
            query.data_ptr(), key.data_ptr(), value.data_ptr(), self._starts, first, out.data_ptr(),
            query.stride(0), key.stride(0), value.stride(0), len(lengths), self.heads, width // self.heads,
            width // key.shape[1], self.longest if near is None else near,
        )  # fmt: skip
        compiled.library.hplm_attend(ctypes.byref(attention))
        return out.to(dtype)

    def _any_length(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, near: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # initialises CUDA's kernels

        options: dict[str, Any] = {} if near is None else {"window_size": (near, near)}
        if key.shape[1] < query.shape[1]:
            options["enable_gqa"] = True
        head = query.shape[1] // self.heads
        query, key, value = (x.view(len(x), -1, head) for x in (query, key, value))
        attended = varlen_attn(query, key, value, ends, ends, self.longest, self.longest, **options)
        return cast(Tensor, attended).flatten(1)  # it returns a pair only with `return_aux`


class CausalAttention:
    """A decoder's attention inside each packed sequence: a token sees itself and those before it. It has a backward pass."""

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        self.heads = heads
        self.runs = runs_of(lengths)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        head = query.shape[1] // self.heads
        sizes = [length * count for length, count in self.runs]
        parts: list[Tensor] = []
        split = (x.split_with_sizes(sizes) for x in (query, key, value))
        for (length, count), *own in zip(self.runs, *split, strict=True):
            sees = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            query, key, value = (heads_of(x, count, head) for x in own)
            parts.append(end_to_end(attend(query, key, value, sees)))
        return torch.cat(parts)


class SinkAttention:
    """A decoder's attention inside packed windows. The first token is seen by all of them, as if each began with it.

    Deep layers pile up attention on a text's first token. A window without one would take its own first token for it.
    """

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        self.heads = heads
        self.runs = runs_of(lengths)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        head = query.shape[1] // self.heads
        sizes = [1, *(length * count for length, count in self.runs)]
        queries, keys, values = (x.split_with_sizes(sizes) for x in (query, key, value))
        first_query, first_key, first_value = (heads_of(x[0], 1, head) for x in (queries, keys, values))
        parts = [end_to_end(attend(first_query, first_key, first_value))]
        for (length, count), *own in zip(self.runs, queries[1:], keys[1:], values[1:], strict=True):
            query, key, value = (heads_of(x, count, head) for x in own)
            key, value = (
                torch.cat([first.expand(count, -1, -1, -1), x], 2) for first, x in ((first_key, key), (first_value, value))
            )
            sees = torch.ones(length, length + 1, dtype=torch.bool, device=query.device).tril(1)
            parts.append(end_to_end(attend(query, key, value, sees)))
        return torch.cat(parts)


def rows_attend(query: Tensor, key: Tensor, value: Tensor, count: int, heads: int, near: int | None = None) -> Tensor:
    """Computes attention inside each of `count` sequences of equal length. `heads` are those of queries.

    Keys and values may belong to other sequences, of another length, unless only `near` ones are seen.
    """
    head = query.shape[1] // heads
    query, key, value = (heads_of(x, count, head) for x in (query, key, value))
    length = key.shape[2]
    if near is None or near + 1 >= length:
        return end_to_end(attend(query, key, value))
    parts: list[Tensor] = []
    for start in range(0, length, NEAR_ROWS):  # a mask for all tokens of a long text would not fit into memory
        stop = min(start + NEAR_ROWS, length)
        first, last = max(0, start - near), min(length, stop + near)
        rows, keys = torch.arange(start, stop, device=query.device), torch.arange(first, last, device=query.device)
        sees = (rows[:, None] - keys).abs() <= near
        parts.append(attend(query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last], sees))
    return end_to_end(torch.cat(parts, 2))


def runs_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the lengths of neighbours, each with how many there are."""
    return [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]


def heads_of(x: Tensor, count: int, head: int) -> Tensor:
    """Turns tokens x heads * head, of so many sequences of equal length, into sequences x heads x tokens x head."""
    return x.view(count, len(x) // count, -1, head).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Computes attention over sequences x heads x tokens x head. Keys and values may have fewer heads."""
    if query.requires_grad and query.dtype is torch.bfloat16 and query.device.type == "cpu":
        # In the backward pass, torch's CPU kernel takes five times as long in 16 bits as in 32.
        with torch.autocast("cpu", enabled=False):
            return attend(query.float(), key.float(), value.float(), mask).to(query.dtype)
    return scaled_dot_product_attention(query, key, value, mask, enable_gqa=key.shape[1] < query.shape[1])


def end_to_end(attended: Tensor) -> Tensor:
    """Turns sequences x heads x tokens x head into tokens x heads * head."""
    sequences, _, length, _ = attended.shape
    return attended.transpose(1, 2).reshape(sequences * length, -1)
