"""Rotary positions: queries and keys are rotated by an angle that grows with the position.

As in Hugging Face's models, the two numbers that are rotated together are half a head apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Turn:
    """The rotation of packed tokens, which all layers share."""

    def __init__(self, positions: Tensor, head: int, base: float, dtype: torch.dtype) -> None:
        """`head`: the numbers of a head."""
        frequencies = 1.0 / base ** (torch.arange(0, head, 2, dtype=torch.float32, device=positions.device) / head)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.stack([cos, cos], 1).to(dtype)[:, None]  # tokens x 1 x 2 x half a head
        self._sin = torch.stack([-sin, sin], 1).to(dtype)[:, None]

    def split(self, projected: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries, rotated keys and values of such widths, which lie side by side in `projected`."""
        query, key, _ = widths
        both = projected[:, : query + key]
        pairs = both.view(len(both), -1, 2, self._cos.shape[-1])  # tokens x heads x 2 x half a head
        turned = torch.addcmul(pairs * self._cos, pairs.flip(2), self._sin).flatten(1)
        return turned[:, :query], turned[:, query:], projected[:, query + key :]
