"""The models under a head: an hPLM, which starts from the tables, and the whole model that it is compared with.

Both return hidden states of the tokens that the head reads, and compute no more of the last layer than these need. Those of a
decoder are what the logits of next tokens are made from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from builder.store.store import Store
from hplm.engine.engine import Precision
from hplm.model.attention import CausalAttention, PackedAttention
from hplm.model.checkpoint import Checkpoint, full_stack, load_checkpoint
from hplm.model.config import BackboneConfig
from hplm.model.families import part_of
from hplm.model.layer import Adapt, Attend, Layers, Rotation, norm_of, unchanged
from hplm.model.products import EightBitLinear, replace_products
from hplm.model.stacks import UpperStack, through, turn_of

if TYPE_CHECKING:
    from builder.tasks.lookup import Pack


class Body(nn.Module):
    """Upper layers, on which adapters work. `below` computes what enters them."""

    config: BackboneConfig

    @property
    def upper_layers(self) -> Layers:
        raise NotImplementedError

    def below(self, pack: Pack) -> tuple[Tensor, Attend, Rotation | None]:
        """Returns what enters the upper layers, their attention, and what turns their queries and keys."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> Tensor:
        """Returns what heads read of tokens that have passed some layers."""
        raise NotImplementedError

    def part(self, name: str) -> Iterable[nn.Parameter]:
        """Returns the parameters that learn, by a name of `TrainingOptions.body_part`."""
        return self.upper_layers.parameters()

    def forward(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> Tensor:
        """Returns the states of the rows that are read, after all upper layers or the first. Heads read 32 bits."""
        x, attend, turn = self.below(pack)
        return self.leave(through(self.upper_layers[:layers], x, attend, adapters, pack.reading, turn)).float()

    def states(self, pack: Pack, adapters: Sequence[Adapt] | None, layers: int | None = None) -> list[Tensor]:
        """Returns what heads read of all tokens that enter the upper layers, and after each layer, or after the first."""
        own, (x, attend, turn) = self.upper_layers[:layers], self.below(pack)
        states = [self.leave(x)]
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

    def below(self, pack: Pack) -> tuple[Tensor, Attend, Rotation | None]:
        sums = pack.sums().to(self.upper.layers[0].ffn_norm.weight.dtype)
        x, attend = self.upper.enter(sums, pack.positions, pack.segments), attention_of(self.config, pack.lengths, sums.device)
        return x, attend, turn_of(self.config, pack.positions, x.dtype)


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
        self._lower, self._upper = config.lower_layers, config.upper_layers
        weights = checkpoint.weights
        for part in ("words", "positions", "segments"):
            if (own := weights.get(f"{part}.weight")) is not None:
                own = own.to(torch.float32, copy=True)
                self.add_module(part, nn.Embedding.from_pretrained(own, freeze=False))
        is_normed = config.normed_words and not config.is_decoder
        for part, is_there in (("norm", is_normed), ("final_norm", not config.enters_normed)):
            self.add_module(part, norm_of(config) if is_there else nn.Identity())
            self.get_submodule(part).load_state_dict(part_of(weights, f"{part}."))
        if config.is_decoder:
            self.next_token = nn.Linear(config.hidden, config.vocabulary, bias=False)
            self.next_token.load_state_dict(part_of(weights, "next_token."))
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
        upper, every = set(self.upper_layers.parameters()), self.layers if self.config.is_decoder else self
        return [own for own in every.parameters() if name == "all" or (own in upper) == (name == "upper")]

    @torch.inference_mode()
    def at_split(self, tokens: Tensor, positions: Tensor, lengths: list[int]) -> Tensor:
        """Returns the states at the split, of packed texts of one segment."""
        return self._through(self._lower, tokens, positions, torch.zeros_like(positions), lengths)[0]

    @torch.inference_mode()
    def taught(
        self, tokens: Tensor, positions: Tensor, lengths: list[int], rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns what two halves learn to match: the states at the split, and what leaves all layers. `rows`: of there."""
        at_split, attend, turn = self._through(self._lower, tokens, positions, torch.zeros_like(positions), lengths)
        return at_split, self.leave(through(self.layers[self._lower :], at_split, attend, rows=rows, turn=turn))

    def below(self, pack: Pack) -> tuple[Tensor, Attend, Rotation | None]:
        learns = any(own.requires_grad for own in (self.words.weight, *self.layers[:1].parameters()))
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            lower = len(self.layers) - self._upper
            return self._through(lower, pack.tokens, pack.positions, pack.segments, pack.lengths)

    def _through(
        self, layers: int, tokens: Tensor, positions: Tensor, segments: Tensor, lengths: list[int]
    ) -> tuple[Tensor, Attend, Rotation | None]:
        """Returns what leaves the first layers, and what the others need."""
        attend, x = attention_of(self.config, lengths, tokens.device), self.embedded(tokens, positions, segments)
        turn = turn_of(self.config, positions, x.dtype)
        return through(self.layers[:layers], x, attend, turn=turn), attend, turn

    def embedded(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Returns what enters the first layer."""
        x = self.words(tokens)
        if self.config.has_places:
            x = x + self.positions(positions)
        return self.norm(x + self.segments(segments) if self.config.segments else x)

    def with_layers(self, chosen: Sequence[int]) -> WholeBody:
        """Returns a copy that has only these layers, all of them upper ones."""
        other = copy.deepcopy(self)
        other.layers, other._upper = Layers(other.layers[i] for i in chosen), len(chosen)
        return other


def attention_of(config: BackboneConfig, lengths: list[int], device: torch.device) -> Attend:
    """Returns the attention inside each of some packed texts. A decoder's sees no later tokens."""
    return CausalAttention(lengths, config.heads) if config.is_decoder else PackedAttention(lengths, config.heads, device)


def checkpoint_of(model: str, config: BackboneConfig) -> Checkpoint:
    """Loads a model that is divided as a backbone is."""
    return load_checkpoint(model, config.name, config.lower_layers, config.upper_layers, config.window)
