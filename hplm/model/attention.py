"""Attention over texts that are stored end to end in one tensor of tokens x hidden. No text attends to another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hplm.arrays import Array
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of

CPU = torch.device("cpu")


class PackedAttention:
    """Self-attention inside each packed sequence; `lengths` are their tokens. There is no padding and no score between texts.

    Neighbouring sequences of equal length are computed together. CUDA has a kernel for sequences of any length in 16 bits,
    which takes one call. Elsewhere there is one call for each length.
    """

    def __init__(self, lengths: Sequence[int], heads: int, device: torch.device = CPU) -> None:
        self.heads = heads
        self.runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]
        self._ends: Tensor | None = None
        if device.type == "cuda" and len(self.runs) > 1:
            self._ends = sent(torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32), device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.runs) == 1:
            length, count = self.runs[0]
            return rows_attend(query, key, value, count, length, self.heads)
        if self._ends is not None and query.dtype in (torch.bfloat16, torch.float16):
            return self._any_length(query, key, value, self._ends)
        # Splitting and joining costs one copy in the backward pass. Slicing would cost a whole copy for every run.
        sizes = [length * count for length, count in self.runs]
        queries, keys, values = (x.split_with_sizes(sizes) for x in (query, key, value))
        parts = zip(queries, keys, values, self.runs, strict=True)
        return torch.cat([rows_attend(q, k, v, count, length, self.heads) for q, k, v, (length, count) in parts])

    def _any_length(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # initialises CUDA's kernels

        longest = max(length for length, _ in self.runs)
        query, key, value = (x.view(len(x), self.heads, -1) for x in (query, key, value))
        attended = varlen_attn(query, key, value, ends, ends, longest, longest)
        return cast(Tensor, attended).flatten(1)  # it returns a pair only with `return_aux`


class RowAttention:
    """Self-attention over rows of equal width, each with some texts and their padding. Scores between texts are masked.

    `rooms` are the lengths of the texts with the padding behind them. Padding attends to its text, so that no row of scores
    is masked completely and becomes NaN.
    """

    def __init__(self, lengths: Array, rooms: Array, width: int, heads: int, device: torch.device, dtype: torch.dtype) -> None:
        self.heads = heads
        self.width = width
        self.rows = int(rooms.sum()) // width
        self.mask: Tensor | None = None
        within = np.arange(self.rows * width) - np.repeat(np.cumsum(rooms) - rooms, rooms)
        sees = (within < np.repeat(lengths, rooms)).reshape(self.rows, 1, width)  # rows x from x to
        if len(lengths) > self.rows:
            owner = np.repeat(np.arange(len(rooms)), rooms).reshape(self.rows, width)
            sees = sees & (owner[:, :, None] == owner[:, None, :])
        if not sees.all():
            hidden = sent(tensor_of(~sees[:, None]), device)
            self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return rows_attend(query, key, value, self.rows, self.width, self.heads, self.mask)


def rows_attend(
    query: Tensor, key: Tensor, value: Tensor, count: int, length: int, heads: int, mask: Tensor | None = None
) -> Tensor:
    """Computes attention inside each of `count` sequences of equal length."""

    def split(x: Tensor) -> Tensor:  # tokens x hidden -> sequences x heads x tokens x head
        return x.view(count, length, heads, -1).transpose(1, 2)

    query, key, value = split(query), split(key), split(value)
    if query.requires_grad and query.dtype is torch.bfloat16 and query.device.type == "cpu":
        # In the backward pass, torch's CPU kernel takes five times as long in 16 bits as in 32.
        with torch.autocast("cpu", enabled=False):
            attended = scaled_dot_product_attention(query.float(), key.float(), value.float(), mask).to(query.dtype)
    else:
        attended = scaled_dot_product_attention(query, key, value, mask)
    return attended.transpose(1, 2).reshape(count * length, -1)
