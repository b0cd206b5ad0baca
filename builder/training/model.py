"""A tenant's adapter and head in one slot, applied by the code that serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from builder.learning.bodies import Body
from builder.learning.loop import Diverged
from builder.tasks.lookup import Pack
from hplm.adapters.groups import Tiles
from hplm.adapters.layout import Layout
from hplm.adapters.layout_rows import means
from hplm.model.layer import QKV, Adapt
from hplm.tenants.embedding import MEAN, Embedding
from hplm.tenants.knowledge import Adapter, Head

Weights = dict[str, Tensor]
SPREAD = 0.02  # of a tenant's random numbers


class TenantModel(nn.Module):
    def __init__(self, adapter: Layout | None, head: Layout | None, seed: int, embedding: Embedding | None = None) -> None:
        """`head`: None of a tenant that generates text or makes vectors, which only has an adapter."""
        super().__init__()
        self._head, self._embedding = head, embedding
        self.pools = embedding is not None and embedding.pooling == MEAN  # whether it reads the mean of a text's states
        self.mean, self.spread = 0.0, 1.0  # of values: the head learns normalised ones, `round_to_storage` folds both in
        generator = torch.Generator().manual_seed(seed)
        # The tensors that are not random start at zero, so that at first the adapter changes nothing.
        self._slots = [(adapter, slot(adapter, generator)) for _ in range(adapter.layers)] if adapter is not None else []
        self.adapters = nn.ModuleList(own for _, own in self._slots)
        self.head = slot(head, generator) if head is not None else nn.ParameterDict()
        if head is not None:
            self._slots.append((head, self.head))

    @classmethod
    def of(cls, adapter: Adapter | None, head: Head | None, embedding: Embedding | None = None) -> TenantModel:
        """Returns a model with stored weights."""
        layout, layers = adapter or (None, None)
        own, weights = head or (None, {})
        model = cls(layout, own, 0, embedding)  # whose random numbers they replace
        model.load(layers, weights)
        return model

    def forward(self, body: Body, pack: Pack, layers: int | None = None) -> Tensor:
        """Returns the logits of the rows that the head reads, after all upper layers or the first."""
        return self.read(self.hidden(body, pack, layers))

    def hidden(self, body: Body, pack: Pack, layers: int | None = None) -> Tensor:
        """Returns the rows that the head reads, after all upper layers or the first. Those of vectors are pooled."""
        if self.pools:
            pack = replace(pack, reading=torch.arange(len(pack.tokens), device=pack.tokens.device))
        read = body(pack, self.adapts(tiles(pack.tokens), tiles(pack.reading)) or None, layers)
        return means(read, np.array(pack.lengths)) if self.pools else read

    def read_of(self, states: Tensor, pack: Pack) -> Tensor:
        """Returns the rows that the head reads of the states of all tokens."""
        return means(states.float(), np.array(pack.lengths)) if self.pools else states[pack.reading]

    def states(self, body: Body, pack: Pack, layers: int | None = None) -> list[Tensor]:
        """Returns the states of all tokens: those that enter the upper layers, and those after each, or after the first."""
        every = tiles(pack.tokens)
        return body.states(pack, self.adapts(every, every) or None, layers)

    def read(self, hidden: Tensor) -> Tensor:
        """Returns the head's logits of hidden rows; without a head the rows, or vectors of them."""
        if (own := self._embedding) is not None:
            cut = hidden[:, : own.dimensions].float()
            return normalize(cut, dim=1) if own.normalised else cut
        if self._head is None:
            return hidden
        return self._head.read(hidden, tiles(hidden), dict(self.head.items())).float() * self.spread + self.mean

    def adapts(self, every: Tiles, read: Tiles) -> list[Adapt]:
        """Returns a function a layer. After its attention, the last layer has only the rows that the head reads."""

        def adapt(layout: Layout, last: bool, weights: nn.ParameterDict, at: str, before: Tensor, after: Tensor) -> Tensor:
            own = {name: weight.to(after.dtype) for name, weight in weights.items()}
            return layout.adapt(at, before, after, read if last and at != QKV else every, own)

        layers = self._slots[: len(self.adapters)]
        return [partial(adapt, layout, number == len(layers), own) for number, (layout, own) in enumerate(layers, start=1)]

    @torch.no_grad()
    def shift(self, outputs: np.ndarray) -> None:
        """Adds a number to each of the head's outputs."""
        self.head["bias"].add_(torch.from_numpy(outputs).to(self.head["bias"].device) / self.spread)

    @torch.no_grad()
    def round_to_storage(self) -> None:
        """Rounds to the precision of records, so that the scored weights are the served ones."""
        if self._head is not None:
            self.head["weight"].mul_(self.spread)
            self.head["bias"].mul_(self.spread).add_(self.mean)
        self.mean, self.spread = 0.0, 1.0
        for layout, own in self._slots:
            for name, weight in rounded(dict(own.items()), layout, "training diverged", "Use a smaller learning rate").items():
                own[name].copy_(weight)

    def stored(self) -> tuple[list[Weights] | None, Weights]:
        """Returns adapter by layer (None for a head alone) and head, without the slot dimension."""
        every = [
            {name: tensor.detach()[0].to(layout.torch_dtype).cpu() for name, tensor in own.items()}
            for layout, own in self._slots
        ]
        head = every.pop() if self._head is not None else {}
        return every or None, head

    @torch.no_grad()
    def go_on(self, adapter: Sequence[Weights] | None, head: Weights) -> None:
        """Takes stored weights to train on. The head then learns values normalised by `mean` and `spread`."""
        self.load(adapter, head)
        if self._head is not None:
            self.head["weight"].div_(self.spread)
            self.head["bias"].sub_(self.mean).div_(self.spread)

    @torch.no_grad()
    def load(self, adapter: Sequence[Mapping[str, Tensor]] | None, head: Mapping[str, Tensor]) -> None:
        every: list[Mapping[str, Tensor]] = [*(adapter or ()), *([head] if head else [])]
        for (_, own), weights in zip(self._slots, every, strict=True):
            for name, parameter in own.items():
                parameter[0].copy_(weights[name])


def slot(layout: Layout, generator: torch.Generator, spread: float | None = SPREAD) -> nn.ParameterDict:
    """Returns the tensors of one layer, in one slot: some are random, the others zero. Without `spread` it suits the width."""
    found = nn.ParameterDict({name: torch.zeros(1, *shape) for name, shape in layout.shapes.items()})
    for name in layout.drawn:
        nn.init.normal_(found[name], std=spread or found[name].shape[-1] ** -0.5, generator=generator)
    return found


def tiles(rows: Tensor) -> Tiles:
    """Says that all rows are of the one slot."""
    return Tiles(np.array([0]), np.array([len(rows)]), rows.device)


def rounded(weights: Mapping[str, Tensor], layout: Layout, failed: str, way_out: str) -> Weights:
    """Returns weights in the precision of records. Raises if one is too large for it."""
    found = {name: weight.to(layout.torch_dtype) for name, weight in weights.items()}
    if not all(weight.isfinite().all() for weight in found.values()):
        raise Diverged(f"{failed}: a weight is too large for 16 bits. {way_out}")
    return found
