"""What stands under a head: the road of an hPLM, which begins at the tables, and the whole BERT that it is compared with.

Both say something of the tokens that the head reads, and compute no more of the last layer than that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from builder.training.examples import Pack
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import Checkpoint, full_stack
from hplm.model.layer import Adapt
from hplm.model.stacks import UpperStack, through


class PlotBody(nn.Module):
    """Tables below, the shared upper stack above."""

    reads_tables = True

    def __init__(self, upper: UpperStack, heads: int) -> None:
        super().__init__()
        self.upper = upper
        self._heads = heads

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None) -> Tensor:
        return self.from_sums(pack.sums, pack, adapters)

    def from_sums(self, sums: Tensor, pack: Pack, adapters: Sequence[Adapt] | None) -> Tensor:
        attend = PackedAttention(pack.lengths, self._heads, sums.device)
        return self.upper(sums, pack.positions, pack.segments, attend, adapters, pack.reading)


class WholeBody(nn.Module):
    """The original model, its lower layers computed; adapters work on its upper ones."""

    reads_tables = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        config, weights = checkpoint.config, checkpoint.weights
        self._heads, self._upper = config.heads, config.upper_layers
        self.words, self.positions, self.segments = (
            nn.Embedding.from_pretrained(weights[f"embeddings.{part}_embeddings.weight"].clone(), freeze=False)
            for part in ("word", "position", "token_type")
        )
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.norm.load_state_dict({kind: weights[f"embeddings.LayerNorm.{kind}"] for kind in ("weight", "bias")})
        self.layers = full_stack(checkpoint)

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None) -> Tensor:
        frozen = not self.words.weight.requires_grad
        lower = len(self.layers) - self._upper
        attend = PackedAttention(pack.lengths, self._heads, pack.tokens.device)
        with torch.no_grad() if frozen else nullcontext():
            x = self.words(pack.tokens) + self.positions(pack.positions) + self.segments(pack.segments)
            x = through(self.layers[:lower], self.norm(x), attend)
        return through(self.layers[lower:], x, attend, adapters, pack.reading)


Body = PlotBody | WholeBody
