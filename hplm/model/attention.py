"""Attention over packed tokens: texts lie end to end in one tensor, and no text sees another.

Sequences of one length are computed together; the caller orders a batch by length, so there are as many kernel calls as
distinct lengths, no padding and no score that crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention:
    """Self-attention inside each of the sequences that `lengths` cuts the packed tokens into."""

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        self.heads = heads
        self.runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.runs) == 1:
            return self._run(query, key, value, *self.runs[0])
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        start = 0
        for length, count in self.runs:
            part = slice(start, start + length * count)
            out[part] = self._run(query[part], key[part], value[part], length, count)
            start = part.stop
        return out

    def _run(self, query: Tensor, key: Tensor, value: Tensor, length: int, count: int) -> Tensor:
        def split(x: Tensor) -> Tensor:  # tokens x hidden -> sequences x heads x tokens x head
            return x.unflatten(0, (count, length)).unflatten(2, (self.heads, -1)).transpose(1, 2)

        attended = scaled_dot_product_attention(split(query), split(key), split(value))
        return attended.transpose(1, 2).reshape(count * length, -1)


class WindowAttention:
    """Self-attention inside windows of n tokens, some of which are absent.

    Windows are tiny and many: two plain products over all of them beat a kernel made for long sequences.
    """

    def __init__(self, present: Tensor, heads: int) -> None:
        self.heads = heads
        self.windows, self.n = present.shape
        self.mask = torch.zeros(present.shape, device=present.device).masked_fill(~present, float("-inf"))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:  # tokens x hidden -> windows x n x heads x head
            return x.view(self.windows, self.n, self.heads, -1)

        query, key, value = split(query), split(key), split(value)
        scale = query.shape[-1] ** -0.5
        scores = (query.unsqueeze(2) * key.unsqueeze(1)).sum(-1) * scale  # windows x to x from x heads
        weights = torch.softmax(scores + self.mask[:, None, :, None].to(scores.dtype), dim=2)
        return (weights.unsqueeze(-1) * value.unsqueeze(1)).sum(2).flatten(0, 1).flatten(1)
