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


@dataclass(frozen=True)
class Part:
    """The rows of a batch whose adapters or heads have one layout."""

    layout: Layout
    groups: Groups
    layers: Weights
    arrived: Sequence[Mark]  # one for each layer: after it the layer's weights are on the device
    rows: Tensor | None  # None: all rows


@dataclass(frozen=True)
class Parted:
    """The texts of a batch whose records have one layout."""

    layout: Layout
    slots: Array
    texts: Array | None  # None: all


def parted(placed: Sequence[Placed | None]) -> list[Parted]:
    """Divides texts by the layout of their records."""
    of_layout: dict[Layout, list[tuple[int, int]]] = {}
    for index, slot in enumerate(placed):
        if slot is not None:
            of_layout.setdefault(slot[0], []).append((index, slot[1]))
    found: list[Parted] = []
    for layout, texts in of_layout.items():
        index, slots = np.array(texts).T
        found.append(Parted(layout, slots, None if len(texts) == len(placed) else index))
    return found


def parts_of(
    divided: Sequence[Parted],
    counts: Array,
    slots: Mapping[Layout, Slots],
    arrived: Mapping[Layout, Sequence[Mark]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Part]:
    """Divides the rows by layout. `counts` has the rows of each text, `slots` the weights, and `arrived` their marks."""
    parts: list[Part] = []
    for one in divided:
        own = counts if one.texts is None else counts[one.texts]
        if not own.any():
            continue
        groups = one.layout.group(np.repeat(one.slots, own), device, one.layout.computed_in(dtype))
        rows = None
        if one.texts is not None:
            mine = np.zeros(len(counts), dtype=bool)
            mine[one.texts] = True
            rows = sent(tensor_of(np.flatnonzero(np.repeat(mine, counts))), device)
        parts.append(Part(one.layout, groups, slots[one.layout].layers, arrived[one.layout], rows))
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
