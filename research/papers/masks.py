"""Attention over rows of several texts, and of targets to their sources: masks between texts (TCB, Eq. 5 to 8)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.model.attention import rows_attend
from hplm.model.tensors import sent


class RowAttention:
    """Attention of rows of equal width to rows of the texts that they read: their own, or their sources. Both have padding.

    A row has the same texts in both, and scores between texts are masked. `rooms` are the lengths of texts with the padding
    behind them, `read` and `read_rooms` the lengths and the rooms of what they read. Padding attends to its text, so that no
    row of scores is masked completely and becomes NaN. `causal`: a token attends to itself and to those before it.
    """

    def __init__(
        self,
        rooms: Array,
        read: Array,
        read_rooms: Array,
        rows: int,
        heads: int,
        device: torch.device,
        dtype: torch.dtype,
        causal: bool = False,
    ) -> None:
        self.rows, self.heads = rows, heads
        self.mask: Tensor | None = None
        self.causal = causal and len(read) == rows  # padding lies behind a row's only text: no mask is needed
        if self.causal:
            return
        within = np.arange(int(read_rooms.sum())) - np.repeat(np.cumsum(read_rooms) - read_rooms, read_rooms)
        sees = (within < np.repeat(read, read_rooms)).reshape(rows, 1, -1)
        if len(read) > rows:
            owner, its = (np.repeat(np.arange(len(one)), one).reshape(rows, -1) for one in (rooms, read_rooms))
            sees = sees & (owner[:, :, None] == its[:, None, :])
        sees = np.tril(sees) if causal else sees
        if not sees.all():
            hidden = sent(~sees[:, None], device)
            self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return rows_attend(query, key, value, self.rows, self.heads, self.mask, self.causal)


class CrossAttention:
    """Attention of each packed target to its source, in models that turn one text into another.

    `lengths` are the tokens of targets, `sources` those of their sources. There is no padding and no score between texts.
    """

    def __init__(self, lengths: Sequence[int], sources: Sequence[int], heads: int) -> None:
        self.heads = heads
        self.runs = [(*both, sum(1 for _ in run)) for both, run in groupby(zip(lengths, sources, strict=True))]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = query.split_with_sizes([length * count for length, _, count in self.runs])
        keys, values = (x.split_with_sizes([source * count for _, source, count in self.runs]) for x in (key, value))
        parts = zip(queries, keys, values, self.runs, strict=True)
        return torch.cat([rows_attend(q, k, v, count, self.heads) for q, k, v, (_, _, count) in parts])
