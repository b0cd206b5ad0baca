"""Sheets: how the texts of a batch lie in tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.copying import Mark
from hplm.adapters.layout import Layout
from hplm.adapters.parts import Homes, Part, Placed, parts_of
from hplm.adapters.record import Record
from hplm.adapters.slots import Slots
from hplm.arrays import Array
from hplm.engine.packing import Arrangement, Packing
from hplm.engine.request import Text
from hplm.model.layer import Attend
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.scheduling.selection import Places


@dataclass(frozen=True)
class Weights:
    """Where the adapters and heads of a batch are."""

    placed: Mapping[Record, Placed]
    slots: Mapping[Layout, Slots]
    arrived: Mapping[Layout, Sequence[Mark]]

    def homes(self, records: Sequence[Record | None]) -> Homes:
        return Homes.of([self.placed[record] if record is not None else None for record in records])

    def parts(self, homes: Homes, counts: Array, device: torch.device, dtype: torch.dtype) -> list[Part]:
        """Divides rows by the layouts of their records. `counts`: rows of each text."""
        return parts_of(homes, counts, self.slots, self.arrived, device, dtype)


class RecordHomes(NamedTuple):
    """Where the weights of some texts are: the homes of their `Records`."""

    head: Homes
    adapter: Homes
    exits: Homes

    def some(self, texts: Array) -> RecordHomes:
        return RecordHomes(*(homes.some(texts) for homes in self))


@dataclass(frozen=True)
class Ending:
    """What the last layer and the heads need of the texts that come so far."""

    reading: Tensor  # the index of the token that each answer row reads
    adapters: list[Part]  # of answer rows
    heads: list[Part]


@dataclass(frozen=True)
class Present:
    """The texts that are in a sheet now, and how their rows are computed."""

    texts: list[Text]
    indexes: list[int]  # of these texts in the batch
    arrangement: Arrangement
    homes: RecordHomes
    attend: list[Attend]  # of each stage
    adapters: list[list[Part]]  # of each stage
    rows_of: Array  # answer rows of each text
    ending: Callable[[], Ending]

    @cached_property
    def end(self) -> Ending:
        return self.ending()


@dataclass
class Sheet:
    """The texts of a batch that are computed in one tensor."""

    laying: Sheets
    weights: Weights
    addresses: Array  # of all its texts, end to end
    lengths: Array  # tokens of each text
    homes: Tensor | None  # the place of each token in the tensor; None: in order, with padding behind the last one only
    positions: Tensor
    segments: Tensor
    rows: int  # of its tensors, padding included
    now: Present  # those of its texts that have not left
    sums: Tensor | None = None  # None: not yet gathered
    hidden: Tensor | None = None  # of the present texts: what the layers so far have computed

    def taken(self) -> Tensor:
        """Returns what the layers so far have computed, and forgets it."""
        assert self.hidden is not None  # the layers before have left it
        x, self.hidden = self.hidden, None
        return x

    def asked(self, exit: int) -> Array:
        """Returns the numbers of the present texts that may leave at an exit."""
        return np.array([number for number, text in enumerate(self.now.texts) if text.may_leave(exit)], dtype=np.int64)

    def exit_heads(self, asked: Array, stage: int) -> list[Part]:
        """Returns the heads of exits for the answer rows of some present texts."""
        homes, rows_of = self.now.homes.exits.some(asked), self.now.rows_of[asked]
        return self.weights.parts(homes, rows_of, self.laying.devices[stage], self.laying.dtype)

    def leave(self, numbers: Array) -> Array:
        """Takes present texts out. Returns the rows of the others, which lie end to end from now on, without padding."""
        stays: Array = np.ones(len(self.now.texts), dtype=bool)
        stays[numbers] = False
        before = self.now.arrangement
        rows = before.tokens[np.repeat(stays, before.lengths)]
        texts = list(compress(self.now.texts, stays))
        indexes = list(compress(self.now.indexes, stays))
        arrangement = Arrangement(before.texts[stays], before.lengths[stays], before.lengths[stays])
        homes = self.now.homes.some(stays)
        self.now = self.laying.present(arrangement, texts, indexes, homes, self.weights)
        return rows


@dataclass(frozen=True)
class Sheets:
    """Lays the texts of a batch into sheets."""

    packing: Packing
    attention_heads: int
    dtype: torch.dtype
    devices: Sequence[torch.device]  # of the engine's stages
    few_sizes: bool = False  # round the number of rows up, because the device prepares products for each size

    def lay(self, texts: Sequence[Text], weights: Weights, places: Places | None = None) -> list[Sheet]:
        """Returns sheets of the texts of a batch."""
        lengths = np.array([len(text.addresses) for text in texts], dtype=np.int64)
        arrangements = [_by_adapter(one, texts) for one in self.packing.arrange(lengths, places)]
        if self.few_sizes:
            arrangements = [one.rounded_up() for one in arrangements]
        return [self._sheet(one, [texts[i] for i in one.texts.tolist()], weights) for one in arrangements]

    def _sheet(self, arrangement: Arrangement, texts: list[Text], weights: Weights) -> Sheet:
        lengths, tokens = arrangement.lengths, arrangement.tokens
        offsets = tokens - np.repeat(arrangement.starts, lengths)
        # The place of each token, unless all of them lie in order, with padding behind the last one only.
        scattered = arrangement.width is not None and arrangement.rows > len(tokens)
        home = tokens if scattered else None
        first = self.devices[0]

        def lay(numbers: Array) -> Tensor:
            whole = np.zeros(arrangement.rows, dtype=np.int64)
            whole[slice(len(numbers)) if home is None else home] = numbers
            return index(whole, first)

        homes = RecordHomes(*map(weights.homes, zip(*(text.records for text in texts), strict=True)))
        now = self.present(arrangement, texts, arrangement.texts.tolist(), homes, weights)
        if all(text.plan is None for text in texts):
            _ = now.end  # all come to the end, so that it can be prepared ahead
        return Sheet(
            laying=self,
            weights=weights,
            addresses=np.concatenate([text.addresses for text in texts]),
            lengths=lengths,
            homes=index(home, first) if home is not None else None,
            positions=lay(offsets),
            segments=lay(np.concatenate([text.segments for text in texts])),
            rows=arrangement.rows,
            now=now,
        )

    def present(
        self, arrangement: Arrangement, texts: list[Text], indexes: list[int], homes: RecordHomes, weights: Weights
    ) -> Present:
        rows_of = np.array([len(text.reading) for text in texts], dtype=np.int64)
        attends = {own: arrangement.attention(self.attention_heads, own, self.dtype) for own in set(self.devices)}
        parts = {own: weights.parts(homes.adapter, arrangement.rooms, own, self.dtype) for own in set(self.devices)}

        def ending() -> Ending:
            last = self.devices[-1]
            reading = np.concatenate([text.reading for text in texts]) + np.repeat(arrangement.starts, rows_of)
            return Ending(
                index(reading, last),
                weights.parts(homes.adapter, rows_of, last, self.dtype),
                weights.parts(homes.head, rows_of, last, self.dtype),
            )

        return Present(
            texts=texts,
            indexes=indexes,
            arrangement=arrangement,
            homes=homes,
            attend=[attends[own] for own in self.devices],
            adapters=[parts[own] for own in self.devices],
            rows_of=rows_of,
            ending=ending,
        )


def _by_adapter(arrangement: Arrangement, texts: Sequence[Text]) -> Arrangement:
    """Returns an arrangement in which texts with one adapter are neighbours, so that adapters apply to rows where they lie.

    One with a width stays as it is.
    """
    if arrangement.width is not None:
        return arrangement
    numbers: dict[tuple[Record, Record | None], int] = {}
    chosen: list[int] = arrangement.texts.tolist()
    own = [numbers.setdefault(texts[i].slot_key, len(numbers)) for i in chosen]
    order = np.argsort(own, kind="stable")
    return Arrangement(arrangement.texts[order], arrangement.lengths[order], arrangement.rooms[order])


def index(numbers: Array, device: torch.device) -> Tensor:
    """Returns numbers of rows as a tensor."""
    return sent(tensor_of(numbers.astype(np.int64)), device)
