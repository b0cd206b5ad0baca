"""Sheets: how the texts of a batch lie in tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.copying import Mark
from hplm.adapters.layout import Layout
from hplm.adapters.parts import Part, Placed, parted, parts_of
from hplm.adapters.slots import Slots
from hplm.arrays import Array
from hplm.engine.packing import Arrangement, Packing
from hplm.engine.request import Text
from hplm.model.layer import Attend
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.scheduling.selection import Places


@dataclass
class Sheet:
    """The texts of a batch that are computed in one tensor."""

    indexes: list[int]  # of the texts in the batch
    addresses: Array  # of all these texts, end to end
    lengths: Array
    homes: Tensor | None  # the place of each token in the tensor; None: in order, with padding behind the last one only
    attend: Attend
    positions: Tensor
    segments: Tensor
    reading: Tensor  # the index of the token that each answer row reads
    rows_of: list[int]  # answer rows of each text
    adapters: list[Part]
    reading_adapters: list[Part]  # the same, for answer rows only
    heads: list[Part]
    sums: Tensor | None = None  # None: not yet gathered


@dataclass(frozen=True)
class Sheets:
    """Lays the texts of a batch into sheets."""

    packing: Packing
    attention_heads: int
    device: torch.device
    dtype: torch.dtype
    few_sizes: bool = False  # round the number of rows up, because the device prepares products for each size

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
        arrangements = self.packing.arrange(lengths, places)
        if self.few_sizes:
            arrangements = [arrangement.rounded_up() for arrangement in arrangements]
        return [
            self._sheet(
                arrangement,
                [texts[i] for i in arrangement.texts],
                [adapters[i] for i in arrangement.texts],
                [heads[i] for i in arrangement.texts],
                slots,
                arrived,
            )
            for arrangement in arrangements
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
        # The place of each token, unless all of them lie in order, with padding behind the last one only.
        scattered = arrangement.width is not None and arrangement.rows > len(offsets)
        home = np.repeat(starts, lengths) + offsets if scattered else None

        def lay(numbers: Array) -> Tensor:
            whole = np.zeros(arrangement.rows, dtype=np.int64)
            whole[slice(len(numbers)) if home is None else home] = numbers
            return self._index(whole)

        rows_of = np.array([len(text.reading) for text in texts], dtype=np.int64)
        adapters, heads = parted(adapter_slots), parted(head_slots)
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
            adapters=parts_of(adapters, rooms, slots, arrived, self.device, self.dtype),
            reading_adapters=parts_of(adapters, rows_of, slots, arrived, self.device, self.dtype),
            heads=parts_of(heads, rows_of, slots, arrived, self.device, self.dtype),
        )

    def _index(self, numbers: Array) -> Tensor:
        return sent(tensor_of(numbers.astype(np.int64)), self.device)
