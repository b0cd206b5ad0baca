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
    """Self-attention over rows of equal width, each with some texts and their padding. Scores between texts are masked.

    `rooms` are the lengths of the texts with the padding behind them. Padding attends to its text, so that no row of scores
    is masked completely and becomes NaN. `causal`: a token attends to itself and to those before it.
    """

    def __init__(
        self,
        lengths: Array,
        rooms: Array,
        width: int,
        heads: int,
        device: torch.device,
        dtype: torch.dtype,
        causal: bool = False,
    ) -> None:
        self.heads = heads
        self.rows = int(rooms.sum()) // width
        self.mask: Tensor | None = None
        self.causal = causal and len(lengths) == self.rows  # padding lies behind a row's only text: no mask is needed
        if not self.causal:
            sees = _sees(rooms, lengths, rooms, self.rows)
            self.mask = _mask(np.tril(sees) if causal else sees, device, dtype)

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


class RowCrossAttention:
    """The same over rows of targets and rows of sources, each with padding. A row has the same texts in both.

    A target's padding attends to its source, so that no row of scores is masked completely.
    """

    def __init__(
        self,
        rooms: Array,
        sources: Array,
        source_rooms: Array,
        rows: int,
        heads: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`rooms` are the lengths of targets with their padding, `source_rooms` those of `sources`."""
        self.heads = heads
        self.rows = rows
        self.mask = _mask(_sees(rooms, sources, source_rooms, rows), device, dtype)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return rows_attend(query, key, value, self.rows, self.heads, self.mask)


def _sees(reading: Array, lengths: Array, rooms: Array, rows: int) -> Array:
    """Returns which tokens of texts in `rooms` are seen by tokens of the same texts, in rooms `reading`: rows x from x to."""
    within = np.arange(int(rooms.sum())) - np.repeat(np.cumsum(rooms) - rooms, rooms)
    sees = (within < np.repeat(lengths, rooms)).reshape(rows, 1, -1)
    if len(lengths) == rows:
        return sees
    owner, read = (np.repeat(np.arange(len(its)), its).reshape(rows, -1) for its in (reading, rooms))
    return sees & (owner[:, :, None] == read[:, None, :])


def _mask(sees: Array, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Returns what is added to scores: -inf where nothing is seen. None: all is seen."""
    if sees.all():
        return None
    hidden = sent(~sees[:, None], device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
