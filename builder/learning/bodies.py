"""The models under a head: an hPLM, which starts from the tables, and the whole BERT that it is compared with.

Both return hidden states of the tokens that the head reads, and compute no more of the last layer than these need.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from builder.store.store import Store
from hplm.engine.engine import Precision
from hplm.model.attention import CausalAttention, PackedAttention
from hplm.model.checkpoint import Checkpoint, full_stack, load_checkpoint, split
from hplm.model.config import BackboneConfig
from hplm.model.families import part_of
from hplm.model.layer import Adapt, Attend, Layer, Layers, norm_of, unchanged
from hplm.model.products import EightBitLinear, replace_products
from hplm.model.stacks import UpperStack, through, turn_of
from hplm.model.windows import Window

if TYPE_CHECKING:
    from builder.tasks.lookup import Pack


class Body(nn.Module):
    """Upper layers, on which adapters work. `below` computes what enters them."""

    config: BackboneConfig

    @property
    def upper_layers(self) -> Layers:
        raise NotImplementedError

    def below(self, pack: Pack) -> tuple[Tensor, Attend]:
        """Returns what enters the upper layers, and their attention."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> Tensor:
        """Returns what heads read of tokens that have passed some layers."""
        raise NotImplementedError

    def part(self, name: str) -> Iterable[nn.Parameter]:
        """Returns the parameters that learn, by a name of `TrainingOptions.body_part`."""
        return self.upper_layers.parameters()

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> Tensor:
        """Returns the states of the rows that are read, after all upper layers or the first. Heads read 32 bits."""
        x, attend = self.below(pack)
        turn = turn_of(self.config, pack.positions, x.dtype)
        return self.leave(through(self.upper_layers[:layers], x, attend, adapters, pack.reading, turn)).float()

    def states(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> list[Tensor]:
        """Returns what heads read of all tokens that enter the upper layers, and after each layer, or after the first."""
        own, (x, attend) = self.upper_layers[:layers], self.below(pack)
        turn, states = turn_of(self.config, pack.positions, x.dtype), [self.leave(x)]
        for layer, adapt in zip(own, adapters or [unchanged] * len(own), strict=True):
            x = layer(x, attend, adapt, turn=turn)
            states.append(self.leave(x))
        return states


class PlotBody(Body):
    """The tables and the shared upper stack."""

    def __init__(self, upper: UpperStack) -> None:
        super().__init__()
        self.upper, self.config = upper, upper.config

    @classmethod
    def of(cls, store: Store, precision: Precision | None = None) -> PlotBody:
        """`precision`: of an engine, in which it computes; None: 32 bits, to learn."""
        upper = store.upper()
        if precision is not None:
            if precision.eight_bits:
                replace_products(upper.layers, EightBitLinear)
            upper.to(precision.dtype).eval()
        return cls(upper)

    @property
    def upper_layers(self) -> Layers:
        return self.upper.layers

    def leave(self, x: Tensor) -> Tensor:
        return self.upper.leave(x)

    def below(self, pack: Pack) -> tuple[Tensor, Attend]:
        sums = pack.sums().to(self.upper.layers[0].ffn_norm.weight.dtype)
        attend = PackedAttention(pack.lengths, self.upper.heads, sums.device)
        return self.upper.enter(sums, pack.positions, pack.segments), attend


class DecoderBody(PlotBody):
    """The same of a decoder. It returns what the logits of next tokens are made from."""

    def below(self, pack: Pack) -> tuple[Tensor, Attend]:
        return self.upper.enter(pack.sums(), pack.positions), CausalAttention(pack.lengths, self.upper.heads)


class WholeDecoderBody(Body):
    """An original decoder; adapters work on its upper layers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        config = checkpoint.config
        alone = replace(config, lower_layers=0, upper_layers=checkpoint.total_layers, window=Window(1, causal=True))
        below, self.upper = split(replace(checkpoint, config=alone))
        self.words, self._lower = below.words, config.lower_layers

    @property
    def upper_layers(self) -> Layers:
        return self.upper.layers[self._lower :]

    def part(self, name: str) -> Iterable[nn.Parameter]:
        layers, lower = self.upper.layers, self._lower
        return {"all": layers, "lower": layers[:lower], "upper": layers[lower:]}[name].parameters()

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> Tensor:
        attend = CausalAttention(pack.lengths, self.upper.heads)
        return self.read(pack.tokens, pack.positions, attend, adapters, pack.reading).float()

    def read(self, tokens: Tensor, positions: Tensor, attend: Attend, adapters: Sequence[Adapt] | None, rows: Tensor) -> Tensor:
        """Returns what the logits of the tokens behind `rows` are made from."""
        every = [*[unchanged] * self._lower, *adapters] if adapters else None
        return self.upper.final_norm(self.upper(self.words(tokens), positions, None, attend, every, rows))

    @torch.inference_mode()
    def taught(
        self, tokens: Tensor, positions: Tensor, lengths: list[int], rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the states at the split and, of `rows`, what the logits are made from."""
        layers, x = self.upper.layers, self.upper.enter(self.words(tokens), positions)
        attend, turn = CausalAttention(lengths, self.upper.heads), turn_of(self.upper.config, positions, x.dtype)
        at_split = through(layers[: self._lower], x, attend, turn=turn)
        if rows is None:
            return at_split, None
        at_end = through(layers[self._lower :], at_split.clone(), attend, rows=rows, turn=turn)
        return at_split, self.upper.final_norm(at_end)

    def with_layers(self, chosen: Sequence[int]) -> WholeDecoderBody:
        """Returns a copy that has only these layers, all of them upper ones."""
        other = copy.deepcopy(self)
        other.upper.layers = Layers(Layer(self.upper.config, number) for number in range(len(chosen)))
        for own, number in zip(other.upper.layers, chosen, strict=True):
            own.load_state_dict(self.upper.layers[number].state_dict())
        other._lower = 0
        return other


class WholeBody(Body):
    """The original model with computed lower layers; adapters work on its upper layers."""

    words: nn.Embedding
    positions: nn.Embedding
    segments: nn.Embedding
    norm: nn.Module
    final_norm: nn.Module

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.config = config = checkpoint.config
        self._heads, self._lower, self._upper = config.heads, config.lower_layers, config.upper_layers
        weights = checkpoint.weights
        for part in ("words", "positions", "segments"):
            if (own := weights.get(f"{part}.weight")) is not None:
                self.add_module(part, nn.Embedding.from_pretrained(own.clone(), freeze=False))
        for part, is_there in (("norm", config.normed_words), ("final_norm", not config.enters_normed)):
            self.add_module(part, norm_of(config) if is_there else nn.Identity())
            self.get_submodule(part).load_state_dict(part_of(weights, f"{part}."))
        self.layers = full_stack(checkpoint)

    @classmethod
    def of(cls, store: Store) -> WholeBody:
        return cls(checkpoint_of(store.model, store.config))

    @property
    def upper_layers(self) -> Layers:
        return self.layers[len(self.layers) - self._upper :]

    def leave(self, x: Tensor) -> Tensor:
        return self.final_norm(x)

    def part(self, name: str) -> Iterable[nn.Parameter]:
        upper = set(self.upper_layers.parameters())
        return [parameter for parameter in self.parameters() if name == "all" or (parameter in upper) == (name == "upper")]

    @torch.inference_mode()
    def taught(self, tokens: Tensor, positions: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns what two halves learn to match, of packed texts of one segment: states at the split and after all layers."""
        attend = PackedAttention(lengths, self._heads, tokens.device)
        x = self._embedded(tokens, positions, torch.zeros_like(positions))
        turn = turn_of(self.config, positions, x.dtype)
        at_split = through(self.layers[: self._lower], x, attend, turn=turn)
        return at_split, self.leave(through(self.layers[self._lower :], at_split, attend, turn=turn))

    def below(self, pack: Pack) -> tuple[Tensor, Attend]:
        attend = PackedAttention(pack.lengths, self._heads, pack.tokens.device)
        with nullcontext() if self.words.weight.requires_grad else torch.no_grad():
            x = self._embedded(pack.tokens, pack.positions, pack.segments)
            turn = turn_of(self.config, pack.positions, x.dtype)
            return through(self.layers[: len(self.layers) - self._upper], x, attend, turn=turn), attend

    def _embedded(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.config.has_places:
            x = x + self.positions(positions)
        return self.norm(x + self.segments(segments) if self.config.segments else x)

    def with_layers(self, chosen: Sequence[int]) -> WholeBody:
        """Returns a copy that has only these layers, all of them upper ones."""
        other = copy.deepcopy(self)
        other.layers, other._upper = Layers(other.layers[i] for i in chosen), len(chosen)
        return other


def checkpoint_of(model: str, config: BackboneConfig) -> Checkpoint:
    """Loads a model that is divided as a backbone is."""
    return load_checkpoint(model, config.name, config.lower_layers, config.upper_layers, config.window)
