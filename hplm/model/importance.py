"""The importance of tokens: how much attention they receive (Tabi, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from hplm.model.layer import Attend


class Received:
    """Attention that also adds up how much of it each token receives: from all tokens of its text, over heads and layers.

    Fused attention returns no weights, so they are computed once more. The output is `attend`'s own, bit by bit.
    """

    def __init__(
        self,
        attend: Attend,
        lengths: Sequence[int],
        heads: int,
        rooms: Sequence[int] | None = None,
        watched: Sequence[bool] | None = None,
    ) -> None:
        """`lengths` are the tokens of texts, which lie end to end, each in its room: with its padding. None: there is none.

        `watched`: the texts whose tokens matter. None: all.
        """
        texts = zip(lengths, rooms or lengths, watched or [True] * len(lengths), strict=True)
        self._attend = attend
        self._heads = heads
        self._runs = [(*run, sum(1 for _ in same)) for run, same in groupby(texts)]
        self.total: Tensor | None = None  # of each token, fp32, with zeros for padding and other texts; None: no layer has run

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.total is None:
            self.total = query.new_zeros(len(query), dtype=torch.float32)
        start = 0
        for length, room, is_watched, count in self._runs:
            here = slice(start, start + room * count)
            if is_watched:
                self.total[here].view(count, room)[:, :length] += self._received(query[here], key[here], length, count)
            start = here.stop
        return self._attend(layer, query, key, value)

    def go_on(self, attend: Attend, device: torch.device) -> None:
        """Continues on another device, with the attention that lies there."""
        self._attend = attend
        self.total = self.total.to(device) if self.total is not None else None

    def _received(self, query: Tensor, key: Tensor, length: int, count: int) -> Tensor:
        """Returns what the tokens of `count` texts receive in one layer: texts x tokens."""
        queries, keys = (x.view(count, -1, self._heads, x.shape[1] // self._heads)[:, :length] for x in (query, key))
        scores = queries.transpose(1, 2) @ keys.permute(0, 2, 3, 1)  # texts x heads x from x to
        return torch.softmax(scores * queries.shape[-1] ** -0.5, dim=-1, dtype=torch.float32).sum((1, 2))
