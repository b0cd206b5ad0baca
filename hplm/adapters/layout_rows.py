"""The rows of a batch by the layout of their adapters or heads: each part is applied at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hplm.adapters.groups import Groups
from hplm.adapters.layout import Layout
from hplm.adapters.slots import CopyEvent, Slots
from hplm.arrays import Array, ranges
from hplm.model.layer import KEY_VALUE, QKV
from hplm.model.tensors import sent

Weights = list[dict[str, Tensor]]  # tensors of each layer
RecordSlot = tuple[Slots, int]  # a record's slot, among those of its layout


@dataclass(slots=True)
class LayoutRows:
    """The rows of a batch whose adapters or heads have one layout."""

    layout: Layout
    groups: Groups
    layers: Weights
    arrived: Sequence[CopyEvent]  # one for each layer: after it the layer's weights are on the device
    rows: Tensor | None  # None: all rows


def rows_by_layout(
    record_slots: Sequence[RecordSlot | None],
    counts: Sequence[int],
    arrived: Mapping[Slots, Sequence[CopyEvent]],
    device: torch.device,
) -> list[LayoutRows]:
    """Divides rows, which lie in runs of one record each, by layout.

    `record_slots` has the record of each run, `counts` the rows of each, and `arrived` the events of the weights.
    """
    found: dict[Slots, tuple[list[int], list[int]]] = {}  # slots and rows of runs
    for one, count in zip(record_slots, counts, strict=True):
        if one is None or not count:
            continue
        own, own_counts = found.setdefault(one[0], ([], []))
        if own and own[-1] == one[1]:
            own_counts[-1] += count
        else:
            own.append(one[1])
            own_counts.append(count)
    parts: list[LayoutRows] = []
    for slots, (own, own_counts) in found.items():
        layout, rows = slots.layout, None
        if len(found) > 1 or sum(own_counts) < sum(counts):
            is_mine = [one is not None and one[0] is slots for one in record_slots]
            rows = sent(np.flatnonzero(np.repeat(is_mine, counts)), device)
        groups = slots.way(np.array(own), np.array(own_counts, dtype=np.int64), device)
        parts.append(LayoutRows(layout, groups, slots.layers, arrived[slots], rows))
    return parts


def adapted(parts: Sequence[LayoutRows], layer: int, at: str, before: Tensor, after: Tensor) -> Tensor:
    """Returns the adapted output of a projection (`hplm.model.layer`) for all rows, given its input and output."""
    for part in parts:
        if at not in part.layout.maps:
            continue
        part.arrived[layer].wait()
        weights = part.layers[layer]
        if part.rows is None:
            after = part.layout.adapt(at, before, after, part.groups, weights)
        else:
            mine = before.index_select(0, part.rows), after.index_select(0, part.rows)
            after = after.index_copy(0, part.rows, part.layout.adapt(at, *mine, part.groups, weights))
    return after


def adapted_last(
    parts: Sequence[LayoutRows], of_rows: Sequence[LayoutRows], layer: int, at: str, before: Tensor, after: Tensor
) -> Tensor:
    """Adapts the last layer: after its attention it computes only the rows that are read, to which `of_rows` belong."""
    return adapted(parts if at in (QKV, KEY_VALUE) else of_rows, layer, at, before, after)


def with_means(x: Tensor, reading: Array, rows_of: Array, starts: Array, lengths: Array) -> Tensor:
    """Returns what an exit reads, tokens each with the mean of its text's tokens: rows x (2 * width), in 32 bits.

    `reading`: the token of each row. `rows_of`: the rows of each text. `starts` and `lengths`: where the texts' tokens are.
    """
    read, of_texts = sent(reading, x.device), means(x.float(), lengths, ranges(starts, lengths))
    if len(reading) > len(lengths):
        of_texts = of_texts.index_select(0, sent(np.repeat(np.arange(len(lengths)), rows_of), x.device))
    return torch.cat((x.index_select(0, read).float(), of_texts), dim=1)


def means(x: Tensor, counts: Array, chosen: Array | None = None) -> Tensor:
    """Returns the mean of the first rows of so many, of the next, and so on. `chosen`: only these rows, in order."""
    every = np.arange(len(x)) if chosen is None else chosen
    # As a table whose rows are summed, rows take a tenth of the time of `segment_reduce` on a CPU.
    return embedding_bag(sent(every, x.device), x, sent(np.cumsum(counts) - counts, x.device), mode="mean")
