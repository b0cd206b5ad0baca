"""A tenant's adapter and head in one slot, applied by the code that serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from builder.learning.bodies import Body
from builder.learning.loop import Diverged
from builder.tasks.lookup import Pack
from hplm.adapters.layout import Layout
from hplm.adapters.tiles import Tiles
from hplm.model.layer import QKV, Adapt

Weights = dict[str, Tensor]


class AdapterSlots(nn.ModuleList):
    """The adapter's tensors, layer by layer."""

    if TYPE_CHECKING:

        def __init__(self, slots: Iterable[nn.ParameterDict]) -> None: ...
        def __iter__(self) -> Iterator[nn.ParameterDict]: ...


class TenantModel(nn.Module):
    def __init__(self, adapter: Layout | None, head: Layout, seed: int) -> None:
        super().__init__()
        self._adapter, self._head = adapter, head
        self.mean, self.spread = 0.0, 1.0  # of values: the head learns normalised ones, `round_to_storage` folds both in
        generator = torch.Generator().manual_seed(seed)

        def slot(layout: Layout) -> nn.ParameterDict:
            slot = nn.ParameterDict({name: torch.zeros(1, *shape) for name, shape in layout.shapes.items()})
            for name in layout.drawn:
                nn.init.normal_(slot[name], std=0.02, generator=generator)
            return slot

        # The other tensors start at zero, so that at first the adapter changes nothing.
        self.adapters = AdapterSlots([slot(adapter) for _ in range(adapter.layers)] if adapter is not None else [])
        self.head = slot(head)

    @classmethod
    def of(
        cls, adapter: Layout | None, head: Layout, layers: Sequence[Mapping[str, Tensor]] | None, weights: Mapping[str, Tensor]
    ) -> TenantModel:
        """Returns a model with stored weights: of the adapter by layer, and of the head."""
        model = cls(adapter, head, seed=0)  # whose random numbers they replace
        model.load(layers, weights)
        return model

    def forward(self, body: Body, pack: Pack) -> Tensor:
        return self.read(self.hidden(body, pack))

    def hidden(self, body: Body, pack: Pack, layers: int | None = None) -> Tensor:
        """Returns the rows that the head reads, after all upper layers or the first."""
        device = pack.tokens.device
        every = Tiles(np.zeros(len(pack.tokens), dtype=np.int64), device)
        read = Tiles(np.zeros(len(pack.reading), dtype=np.int64), device)
        return body(pack, self.adapts(every, read) or None, layers)

    def states(self, body: Body, pack: Pack, layers: int | None = None) -> list[Tensor]:
        """Returns the states of all tokens: those that enter the upper layers, and those after each, or after the first."""
        every = Tiles(np.zeros(len(pack.tokens), dtype=np.int64), pack.tokens.device)
        return body.states(pack, self.adapts(every, every) or None, layers)

    def read(self, hidden: Tensor) -> Tensor:
        """Returns the head's logits of hidden rows."""
        rows = Tiles(np.zeros(len(hidden), dtype=np.int64), hidden.device)
        return self._head.read(hidden, rows, dict(self.head.items())).float() * self.spread + self.mean

    def adapts(self, every: Tiles, read: Tiles) -> list[Adapt]:
        """Returns a function a layer. After its attention, the last layer has only the rows that the head reads."""
        layout = self._adapter
        if layout is None:
            return []

        def adapt(last: bool, weights: nn.ParameterDict, at: str, before: Tensor, after: Tensor) -> Tensor:
            own = {name: weight.to(after.dtype) for name, weight in weights.items()}
            return layout.adapt(at, before, after, read if last and at != QKV else every, own)

        return [partial(adapt, i == len(self.adapters) - 1, weights) for i, weights in enumerate(self.adapters)]

    @torch.no_grad()
    def shift(self, outputs: np.ndarray) -> None:
        """Adds a number to each of the head's outputs."""
        self.head["bias"].add_(torch.from_numpy(outputs).to(self.head["bias"].device) / self.spread)

    @torch.no_grad()
    def round_to_storage(self) -> None:
        """Rounds to the precision of records, so that the scored weights are the served ones."""
        self.head["weight"].mul_(self.spread)
        self.head["bias"].mul_(self.spread).add_(self.mean)
        self.mean, self.spread = 0.0, 1.0
        for layout, slot in self._slots():
            for parameter in slot.values():
                parameter.copy_(parameter.to(layout.torch_dtype))
                if not parameter.isfinite().all():
                    raise Diverged("training diverged, a weight is too large for 16 bits: use a smaller learning rate")

    def stored(self) -> tuple[list[Weights] | None, Weights]:
        """Returns adapter by layer (None for a head alone) and head, without the slot dimension."""

        def unslotted(slot: nn.ParameterDict, layout: Layout) -> Weights:
            return {name: tensor.detach()[0].to(layout.torch_dtype).cpu() for name, tensor in slot.items()}

        *adapter, head = (unslotted(slot, layout) for layout, slot in self._slots())
        return adapter or None, head

    def _slots(self) -> Iterator[tuple[Layout, nn.ParameterDict]]:
        """Yields the slots of the adapter's layers, then the head's, each with its layout."""
        if self._adapter is not None:
            for slot in self.adapters:
                yield self._adapter, slot
        yield self._head, self.head

    @torch.no_grad()
    def put(self, adapter: Sequence[Weights], head: TenantModel) -> None:
        """Takes a given adapter, and the head of another model."""
        self.load(adapter, {name: tensor[0] for name, tensor in head.head.items()})
        self.mean, self.spread = head.mean, head.spread

    @torch.no_grad()
    def go_on(self, adapter: Sequence[Weights] | None, head: Weights, mean: float, spread: float) -> None:
        """Takes stored weights to train on. The head then learns values normalised by `mean` and `spread`."""
        self.load(adapter, head)
        self.mean, self.spread = mean, spread
        self.head["weight"].div_(spread)
        self.head["bias"].sub_(mean).div_(spread)

    @torch.no_grad()
    def load(self, adapter: Sequence[Mapping[str, Tensor]] | None, head: Mapping[str, Tensor]) -> None:
        for slot, weights in zip([*self.adapters, self.head], [*(adapter or ()), head], strict=True):
            for name, parameter in slot.items():
                parameter[0].copy_(weights[name])
