"""The models under a head: an hPLM, which starts from the tables, and the whole BERT that it is compared with.

Both return hidden states of the tokens that the head reads, and compute no more of the last layer than these need.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from builder.store.store import Store
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import Checkpoint, full_stack, load_checkpoint
from hplm.model.config import BackboneConfig
from hplm.model.layer import Adapt, Attend, Layers, unchanged
from hplm.model.stacks import UpperStack, through

if TYPE_CHECKING:
    from builder.tasks.lookup import Pack


class PlotBody(nn.Module):
    """The tables and the shared upper stack."""

    reads_tables = True

    def __init__(self, upper: UpperStack, heads: int) -> None:
        super().__init__()
        self.upper = upper
        self._heads = heads

    @classmethod
    def of(cls, store: Store) -> PlotBody:
        return cls(store.upper(), store.config.heads)

    @property
    def upper_layers(self) -> Layers:
        return self.upper.layers

    def part(self, name: str) -> Iterator[nn.Parameter]:
        if name == "lower":
            raise ValueError("a model on tables has no lower layers to train")
        return self.upper.layers.parameters()

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> Tensor:
        return through(self.upper.layers[:layers], *self._below(pack), adapters, pack.reading)

    def states(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> list[Tensor]:
        """Returns the states of all tokens: those that enter the upper layers, and those after each, or after the first."""
        return _after_each(self.upper.layers[:layers], *self._below(pack), adapters)

    def entering(self, sums: Tensor) -> Tensor:
        """Returns rows of the tables as the layers take them."""
        return sums

    def _below(self, pack: Pack) -> tuple[Tensor, Attend]:
        """Returns what enters the upper layers, and their attention."""
        assert pack.sums is not None  # as `reads_tables` says
        x = self.upper.enter(self.entering(pack.sums), pack.positions, pack.segments)
        return x, PackedAttention(pack.lengths, self._heads, x.device)


class WholeBody(nn.Module):
    """The original model with computed lower layers; adapters work on its upper layers."""

    reads_tables = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        config, weights, layers = checkpoint.config, checkpoint.weights, full_stack(checkpoint)
        self._heads, self._lower, self._upper = config.heads, config.lower_layers, config.upper_layers
        self.words, self.positions, self.segments = (
            nn.Embedding.from_pretrained(weights[f"{part}.weight"].clone(), freeze=False)
            for part in ("words", "positions", "segments")
        )
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.norm.load_state_dict({kind: weights[f"norm.{kind}"] for kind in ("weight", "bias")})
        self.layers = layers

    @classmethod
    def of(cls, store: Store) -> WholeBody:
        return cls(checkpoint_of(store.model, store.config))

    @property
    def upper_layers(self) -> Layers:
        return self.layers[len(self.layers) - self._upper :]

    def part(self, name: str) -> Iterator[nn.Parameter]:
        upper = list(self.upper_layers.parameters())
        if name == "all":
            return self.parameters()
        above = {id(parameter) for parameter in upper}
        return iter(upper if name == "upper" else [other for other in self.parameters() if id(other) not in above])

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> Tensor:
        return through(self.upper_layers[:layers], *self._below(pack), adapters, pack.reading)

    def states(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> list[Tensor]:
        """Returns the states of all tokens: those that enter the upper layers, and those after each, or after the first."""
        return _after_each(self.upper_layers[:layers], *self._below(pack), adapters)

    @torch.inference_mode()
    def taught(self, tokens: Tensor, positions: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns what two halves learn to match, of packed texts of one segment: states at the split and after all layers."""
        attend = PackedAttention(lengths, self._heads, tokens.device)
        x = self._embedded(tokens, positions, torch.zeros_like(positions))
        at_split = through(self.layers[: self._lower], x, attend)
        return at_split, through(self.layers[self._lower :], at_split, attend)

    def _below(self, pack: Pack) -> tuple[Tensor, Attend]:
        """Returns what the lower layers compute, and the attention of all layers."""
        attend = PackedAttention(pack.lengths, self._heads, pack.tokens.device)
        with nullcontext() if self.words.weight.requires_grad else torch.no_grad():
            x = self._embedded(pack.tokens, pack.positions, pack.segments)
            return through(self.layers[: len(self.layers) - self._upper], x, attend), attend

    def _embedded(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        return self.norm(self.words(tokens) + self.positions(positions) + self.segments(segments))

    def with_layers(self, chosen: Sequence[int]) -> WholeBody:
        """Returns a copy that has only these layers, all of them upper ones."""
        other = copy.deepcopy(self)
        other.layers, other._upper = Layers(other.layers[i] for i in chosen), len(chosen)
        return other


def checkpoint_of(model: str, config: BackboneConfig) -> Checkpoint:
    """Loads a model that is divided as a backbone is."""
    return load_checkpoint(model, config.name, config.lower_layers, config.upper_layers, config.window)


def _after_each(layers: Layers, x: Tensor, attend: Attend, adapters: Sequence[Adapt] | None) -> list[Tensor]:
    states = [x]
    for layer, adapt in zip(layers, adapters or [unchanged] * len(layers), strict=True):
        states.append(layer(states[-1], attend, adapt))
    return states


Body = PlotBody | WholeBody
