"""Sheets: how the texts of a batch lie in tensors, and which rows have which adapters and heads."""

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
from hplm.engine.packing import Arrangement, Packing
from hplm.engine.request import Text
from hplm.model.layer import Attend
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.scheduling.selection import Places

Weights = list[dict[str, Tensor]]  # tensors of each layer


@dataclass(frozen=True)
class Part:
    """The rows of a batch whose adapters or heads have one layout."""

    layout: Layout
    groups: Groups
    layers: Weights
    arrived: list[Mark]  # one for each layer: after it the layer's weights are on the device
    rows: Tensor | None  # None: all rows


@dataclass
class Sheet:
    """The texts of a batch that are computed in one tensor."""

    indexes: list[int]  # of the texts in the batch
    addresses: Array  # of all these texts, end to end
    lengths: Array
    homes: Tensor | None  # the place of each token in the tensor; None: in order
    attend: Attend
    positions: Tensor
    segments: Tensor
    reading: Tensor  # the index of the token that each answer row reads
    rows_of: list[int]  # answer rows of each text
    adapters: list[Part]
    reading_adapters: list[Part]  # the same, for answer rows only
    heads: list[Part]
    sums: Tensor | None = None  # None: not yet gathered


Placed = tuple[Layout, int]  # a record's layout and slot


@dataclass(frozen=True)
class Sheets:
    """Lays the texts of a batch into sheets."""

    packing: Packing
    attention_heads: int
    device: torch.device
    dtype: torch.dtype

    def lay(
        self,
        texts: list[Text],
        adapters: list[Placed | None],
        heads: list[Placed],
        slots: Mapping[Layout, Slots],
        arrived: dict[Layout, list[Mark]],
        places: Places | None,
    ) -> list[Sheet]:
        """`adapters` and `heads` say where each text has its own. `slots` has the weights, and `arrived` their marks."""
        lengths = np.array([text.tokens for text in texts], dtype=np.int64)
        return [
            self._sheet(
                arrangement,
                [texts[i] for i in arrangement.texts],
                [adapters[i] for i in arrangement.texts],
                [heads[i] for i in arrangement.texts],
                slots,
                arrived,
            )
            for arrangement in self.packing.arrange(lengths, places)
        ]

    def _sheet(
        self,
        arrangement: Arrangement,
        texts: list[Text],
        adapter_slots: list[Placed | None],
        head_slots: list[Placed],
        slots: Mapping[Layout, Slots],
        arrived: dict[Layout, list[Mark]],
    ) -> Sheet:
        lengths, starts, rooms = arrangement.lengths, arrangement.starts, arrangement.rooms
        offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        padded = arrangement.rows > len(offsets)
        home = np.repeat(starts, lengths) + offsets if padded else None  # the place of each token

        def lay(numbers: Array) -> Tensor:
            if home is None:
                return self._index(numbers)
            whole = np.zeros(arrangement.rows, dtype=np.int64)
            whole[home] = numbers
            return self._index(whole)

        rows_of = np.array([len(text.reading) for text in texts], dtype=np.int64)
        adapters, heads = self._parted(adapter_slots), self._parted(head_slots)
        return Sheet(
            indexes=arrangement.texts.tolist(),
            attend=arrangement.attention(self.attention_heads, self.device, self.dtype),
            addresses=np.concatenate([text.addresses for text in texts]),
            lengths=lengths,
            homes=self._index(home) if home is not None else None,
            positions=lay(offsets),
            segments=lay(np.concatenate([text.segments for text in texts])),
            reading=self._index(np.concatenate([text.reading for text in texts]) + np.repeat(starts, rows_of)),
            rows_of=rows_of.tolist(),
            adapters=self._parts(adapters, rooms, slots, arrived),
            reading_adapters=self._parts(adapters, rows_of, slots, arrived),
            heads=self._parts(heads, rows_of, slots, arrived),
        )

    @staticmethod
    def _parted(slots: Sequence[Placed | None]) -> list[tuple[Layout, Array, Array | None]]:
        """Returns the layouts with the slots of their texts, and which texts these are; None: all."""
        of_layout: dict[Layout, list[tuple[int, int]]] = {}
        for index, slot in enumerate(slots):
            if slot is not None:
                of_layout.setdefault(slot[0], []).append((index, slot[1]))
        parted: list[tuple[Layout, Array, Array | None]] = []
        for layout, texts in of_layout.items():
            index, slot = np.array(texts).T
            parted.append((layout, slot, None if len(texts) == len(slots) else index))
        return parted

    def _parts(
        self,
        parted: list[tuple[Layout, Array, Array | None]],
        counts: Array,
        slots: Mapping[Layout, Slots],
        arrived: dict[Layout, list[Mark]],
    ) -> list[Part]:
        """Divides the rows by layout. `counts` has the number of rows of each text."""
        parts: list[Part] = []
        for layout, own_slots, texts in parted:
            dtype = layout.computed_in(self.dtype)
            own = counts if texts is None else counts[texts]
            groups = layout.group(np.repeat(own_slots, own), self.device, dtype)
            rows = None
            if texts is not None:
                mine = np.zeros(len(counts), dtype=bool)
                mine[texts] = True
                rows = self._index(np.flatnonzero(np.repeat(mine, counts)))
            parts.append(Part(layout, groups, slots[layout].layers, arrived[layout], rows))
        return parts

    def _index(self, numbers: Array) -> Tensor:
        return sent(tensor_of(numbers.astype(np.int64)), self.device)
