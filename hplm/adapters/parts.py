"""The rows of a batch by the layout of their adapters or heads: each part is applied at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.copying import Mark
from hplm.adapters.groups import Groups
from hplm.adapters.layout import Layout
from hplm.adapters.slots import Slots
from hplm.arrays import Array
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of

Weights = list[dict[str, Tensor]]  # tensors of each layer
Placed = tuple[Layout, int]  # a record's layout and slot


@dataclass(slots=True)
class Part:
    """The rows of a batch whose adapters or heads have one layout."""

    layout: Layout
    groups: Groups
    layers: Weights
    arrived: Sequence[Mark]  # one for each layer: after it the layer's weights are on the device
    rows: Tensor | None  # None: all rows


@dataclass(slots=True)
class Homes:
    """Where the records of some texts are."""

    layouts: Sequence[Layout]
    layout_of: Array | None  # the number of each text's layout; -1: it has no record; None: all have the only layout
    slots: Array

    @classmethod
    def of(cls, placed: Sequence[Placed | None]) -> Homes:
        first = placed[0]
        if first is None and not any(placed):
            return NOWHERE
        if first is not None and all(one is not None and one[0] is first[0] for one in placed):
            return cls([first[0]], None, np.array([one[1] for one in placed if one is not None], dtype=np.int64))
        numbers: dict[Layout, int] = {}
        found = [(numbers.setdefault(one[0], len(numbers)), one[1]) if one is not None else (-1, 0) for one in placed]
        layout_of, slots = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return cls(list(numbers), layout_of if layout_of.any() or not numbers else None, slots)

    def some(self, texts: Array) -> Homes:
        """Returns the homes of some texts, in their order. One may be there several times."""
        if not self.layouts:
            return self
        return Homes(self.layouts, None if self.layout_of is None else self.layout_of[texts], self.slots[texts])


NOWHERE = Homes([], None, np.empty(0, dtype=np.int64))


def parts_of(
    homes: Homes,
    counts: Array,
    slots: Mapping[Layout, Slots],
    arrived: Mapping[Layout, Sequence[Mark]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Part]:
    """Divides rows by layout. `counts` has the rows of each text, `slots` the weights, and `arrived` their marks."""
    parts: list[Part] = []
    for number, layout in enumerate(homes.layouts):
        own, own_counts, rows = homes.slots, counts, None
        mine = counts if homes.layout_of is None else counts * (homes.layout_of == number)  # rows of this layout
        if not mine.all():
            if not mine.any():
                continue
            mine = mine > 0
            own, own_counts = own[mine], counts[mine]
            if homes.layout_of is not None:
                rows = sent(tensor_of(np.flatnonzero(np.repeat(mine, counts))), device)
        groups = layout.group(own, device, layout.computed_in(dtype), own_counts)
        parts.append(Part(layout, groups, slots[layout].layers, arrived[layout], rows))
    return parts


def adapted(parts: Sequence[Part], layer: int, at: str, before: Tensor, after: Tensor) -> Tensor:
    """Returns the adapted output of a projection (`hplm.model.layer`) for all rows, given its input and output."""
    for part in parts:
        if not part.layout.touches(at):
            continue
        part.arrived[layer].wait()
        weights = part.layers[layer]
        if part.rows is None:
            after = part.layout.adapt(at, before, after, part.groups, weights)
        else:
            mine = before.index_select(0, part.rows), after.index_select(0, part.rows)
            after = after.index_copy(0, part.rows, part.layout.adapt(at, *mine, part.groups, weights))
    return after
