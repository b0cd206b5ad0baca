"""Sheets: how the texts of a batch lie in tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.copying import Mark
from hplm.adapters.layout import Layout
from hplm.adapters.parts import Part, Placed, parted, parts_of
from hplm.adapters.record import Record
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
    lengths: Array  # tokens of each text
    homes: Tensor | None  # the place of each token in the tensor; None: in order, with padding behind the last one only
    attend: list[Attend]  # of each stage
    positions: Tensor
    segments: Tensor
    reading: Tensor  # the index of the token that each answer row reads
    rows_of: list[int]  # answer rows of each text
    adapters: list[list[Part]]  # of each stage
    reading_adapters: list[Part]  # the last stage's, for answer rows only
    heads: list[Part]
    sums: Tensor | None = None  # None: not yet gathered
    hidden: Tensor | None = None  # that a stage has left for the next one


@dataclass(frozen=True)
class Sheets:
    """Lays the texts of a batch into sheets."""

    packing: Packing
    attention_heads: int
    dtype: torch.dtype
    devices: Sequence[torch.device]  # of the engine's stages
    few_sizes: bool = False  # round the number of rows up, because the device prepares products for each size

    def lay(
        self,
        texts: Sequence[Text],
        placed: Mapping[Record, Placed],
        slots: Mapping[Layout, Slots],
        arrived: Mapping[Layout, Sequence[Mark]],
        places: Places | None = None,
    ) -> list[Sheet]:
        """Returns sheets of the texts of a batch.

        `placed` says where their adapters and heads are. `slots` has the weights, and `arrived` their marks.
        """
        arrangements = self.packing.arrange(np.array([len(text.addresses) for text in texts], dtype=np.int64), places)
        if self.few_sizes:
            arrangements = [one.rounded_up() for one in arrangements]
        return [self._sheet(one, [texts[i] for i in one.texts.tolist()], placed, slots, arrived) for one in arrangements]

    def _sheet(
        self,
        arrangement: Arrangement,
        texts: Sequence[Text],
        placed: Mapping[Record, Placed],
        slots: Mapping[Layout, Slots],
        arrived: Mapping[Layout, Sequence[Mark]],
    ) -> Sheet:
        lengths, starts, rooms = arrangement.lengths, arrangement.starts, arrangement.rooms
        offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # The place of each token, unless all of them lie in order, with padding behind the last one only.
        scattered = arrangement.width is not None and arrangement.rows > len(offsets)
        home = np.repeat(starts, lengths) + offsets if scattered else None
        first, last = self.devices[0], self.devices[-1]

        def lay(numbers: Array) -> Tensor:
            whole = np.zeros(arrangement.rows, dtype=np.int64)
            whole[slice(len(numbers)) if home is None else home] = numbers
            return _index(whole, first)

        rows_of = np.array([len(text.reading) for text in texts], dtype=np.int64)
        records = [text.slot_key for text in texts]
        adapters = parted([placed[adapter] if adapter is not None else None for _, adapter in records])
        heads = parted([placed[head] for head, _ in records])
        attends = {own: arrangement.attention(self.attention_heads, own, self.dtype) for own in set(self.devices)}
        parts = {own: parts_of(adapters, rooms, slots, arrived, own, self.dtype) for own in set(self.devices)}
        return Sheet(
            indexes=arrangement.texts.tolist(),
            addresses=np.concatenate([text.addresses for text in texts]),
            lengths=lengths,
            homes=_index(home, first) if home is not None else None,
            attend=[attends[own] for own in self.devices],
            positions=lay(offsets),
            segments=lay(np.concatenate([text.segments for text in texts])),
            reading=_index(np.concatenate([text.reading for text in texts]) + np.repeat(starts, rows_of), last),
            rows_of=rows_of.tolist(),
            adapters=[parts[own] for own in self.devices],
            reading_adapters=parts_of(adapters, rows_of, slots, arrived, last, self.dtype),
            heads=parts_of(heads, rows_of, slots, arrived, last, self.dtype),
        )


def _index(numbers: Array, device: torch.device) -> Tensor:
    return sent(tensor_of(numbers.astype(np.int64)), device)
