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
Placed = tuple[Slots, int]  # a record's slot, among those of its layout


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
    """Where the records of some tenants are."""

    layouts: Sequence[Slots]  # of each layout
    layout_of: Array | None  # the number of each tenant's layout; -1: it has no record; None: all have the only layout
    slots: Array

    @classmethod
    def of(cls, placed: Sequence[Placed | None]) -> Homes:
        numbers: dict[Slots, int] = {}
        found = [(numbers.setdefault(one[0], len(numbers)), one[1]) if one is not None else (-1, 0) for one in placed]
        layout_of, slots = np.array(found, dtype=np.int64).T
        return cls(list(numbers), None if len(numbers) == 1 and None not in placed else layout_of, slots)

    def some(self, tenants: Array) -> Homes:
        """Returns the homes of some tenants, in their order. One may be there several times."""
        return Homes(self.layouts, None if self.layout_of is None else self.layout_of[tenants], self.slots[tenants])


def parts_of(
    homes: Homes, counts: Array, arrived: Mapping[Slots, Sequence[Mark]], device: torch.device, dtype: torch.dtype
) -> list[Part]:
    """Divides rows by layout. `counts` has the rows of each tenant, and `arrived` the marks of its weights."""
    parts: list[Part] = []
    for number, slots in enumerate(homes.layouts):
        own, own_counts, rows, layout = homes.slots, counts, None, slots.layout
        mine = counts if homes.layout_of is None else counts * (homes.layout_of == number)  # rows of this layout
        if 0 in mine:
            if not mine.any():
                continue
            mine = mine > 0
            own, own_counts = own[mine], counts[mine]
            if homes.layout_of is not None:
                rows = sent(tensor_of(np.flatnonzero(np.repeat(mine, counts))), device)
        groups = layout.group(own, device, layout.computed_in(dtype), own_counts)
        parts.append(Part(layout, groups, slots.layers, arrived[slots], rows))
    return parts


def adapted(parts: Sequence[Part], layer: int, at: str, before: Tensor, after: Tensor) -> Tensor:
    """Returns the adapted output of a projection (`hplm.model.layer`) for all rows, given its input and output."""
    for part in parts:
        if at not in part.layout.touched:
            continue
        part.arrived[layer].wait()
        weights = part.layers[layer]
        if part.rows is None:
            after = part.layout.adapt(at, before, after, part.groups, weights)
        else:
            mine = before.index_select(0, part.rows), after.index_select(0, part.rows)
            after = after.index_copy(0, part.rows, part.layout.adapt(at, *mine, part.groups, weights))
    return after
