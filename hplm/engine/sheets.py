"""Sheets: how the texts of a batch lie in tensors, and which of them are still there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.copying import Mark
from hplm.adapters.layout import Layout
from hplm.adapters.parts import Homes, Part, parts_of
from hplm.adapters.slots import Slots
from hplm.arrays import Array, together
from hplm.engine.packing import Arrangement, Packing, end_to_end
from hplm.engine.request import Text
from hplm.model.layer import Attend
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.scheduling.selection import Places


@dataclass(frozen=True)
class Laying:
    """Holds what all batches of an engine share."""

    packing: Packing | None  # None: texts end to end
    attention_heads: int
    positions: int  # that the model has
    dtype: torch.dtype
    devices: Sequence[torch.device]  # of the engine's stages
    few_sizes: bool  # round the number of rows up, because the device prepares products for each size


class Weights(NamedTuple):
    """Where the heads, adapters and exits of some texts are."""

    head: Homes
    adapter: Homes
    exits: Homes
    slots: Mapping[Layout, Slots]
    arrived: Mapping[Layout, Sequence[Mark]]

    def some(self, texts: Array) -> Weights:
        return self._replace(head=self.head.some(texts), adapter=self.adapter.some(texts), exits=self.exits.some(texts))


class Sheet:
    """The texts of a batch that are computed in one tensor. Those that leave at an exit are taken out."""

    sums: Tensor | None = None  # None: not yet gathered
    hidden: Tensor | None = None  # of the texts that have not left: what the layers so far have computed

    def __init__(self, laying: Laying, arrangement: Arrangement, texts: Sequence[Text], weights: Weights) -> None:
        """`texts` are those of the whole batch, `weights` those of its own texts."""
        self.laying = laying
        self.indexes: list[int] = arrangement.texts.tolist()  # of its texts in the batch
        self.texts = [texts[index] for index in self.indexes]
        self.addresses = together([text.addresses for text in self.texts])
        self.lengths = arrangement.lengths  # of all its texts, also of those that have left
        self.rows = arrangement.rows  # of its tensors, padding included
        tokens = arrangement.tokens if arrangement.is_scattered else slice(len(self.addresses))
        places = arrangement.offsets + together([text.segments for text in self.texts]) * np.int64(laying.positions)
        if len(places) < self.rows:
            own, places = places, np.zeros(self.rows, dtype=np.int64)
            places[tokens] = own
        first = laying.devices[0]
        self.places = sent(tensor_of(places), first)  # of each token: its row in the engine's table of positions and segments
        # The row of each token in the tensor; None: in order, with padding behind the last one only.
        self.scattered = None if isinstance(tokens, slice) else sent(tensor_of(tokens), first)
        self._exits = None  # of each text: where it may leave; None: none does
        if any(text.plan is not None for text in self.texts):
            self._exits = np.array([text.exit for text in self.texts])
        self._lie(arrangement, weights)
        if self._exits is None:
            _ = self.ending  # all come to the end, so that it can be prepared ahead

    def _lie(self, arrangement: Arrangement, weights: Weights) -> None:
        """Notes where the texts lie that have not left, and prepares attention and adapters for them."""
        laying = self.laying
        self._arrangement, self._weights = arrangement, weights
        self.rows_of = np.array([len(text.reading) for text in self.texts])  # answer rows of each text
        heads, dtype, devices = laying.attention_heads, laying.dtype, set(laying.devices)
        attends = {own: arrangement.attention(heads, own, dtype) for own in devices}
        parts = {own: self._parts(weights.adapter, arrangement.rooms, own) for own in devices}
        self.attend: list[Attend] = [attends[own] for own in laying.devices]  # of each stage
        self.adapters: list[list[Part]] = [parts[own] for own in laying.devices]
        self.__dict__.pop("ending", None)

    @cached_property
    def ending(self) -> tuple[Tensor, list[Part], list[Part]]:
        """The token that each answer row reads, and the adapters and heads of these rows."""
        last, starts = self.laying.devices[-1], np.repeat(self._arrangement.starts, self.rows_of)
        reading = together([text.reading for text in self.texts]) + starts
        adapter, head = (self._parts(own, self.rows_of, last) for own in (self._weights.adapter, self._weights.head))
        return sent(tensor_of(reading), last), adapter, head

    def _parts(self, homes: Homes, counts: Array, device: torch.device) -> list[Part]:
        return parts_of(homes, counts, self._weights.slots, self._weights.arrived, device, self.laying.dtype)

    def asked(self, exit: int) -> Array:
        """Returns the numbers of the texts that may leave at an exit."""
        return NOBODY if self._exits is None else np.flatnonzero(self._exits == exit)

    def at_exit(self, asked: Array, stage: int) -> tuple[Array, Array, Array, list[Part]]:
        """Returns what an exit reads of some texts: the token of each row, where the texts lie, and the heads."""
        starts, rows_of = self._arrangement.starts[asked], self.rows_of[asked]
        texts: list[int] = asked.tolist()
        reading = np.concatenate([self.texts[number].reading for number in texts]) + np.repeat(starts, rows_of)
        heads = self._parts(self._weights.exits.some(asked), rows_of, self.laying.devices[stage])
        return reading, starts, self._arrangement.lengths[asked], heads

    def leave(self, numbers: Array) -> Array:
        """Takes texts out. Returns the rows of the others, which lie end to end from now on, without padding."""
        stays: Array = np.ones(len(self.texts), dtype=bool)
        stays[numbers] = False
        before = self._arrangement
        assert self._exits is not None  # some texts may leave
        self.texts, self.indexes = list(compress(self.texts, stays)), list(compress(self.indexes, stays))
        self._exits = self._exits[stays]
        if self.texts:
            lengths = before.lengths[stays]
            self._lie(Arrangement(before.texts[stays], lengths, lengths), self._weights.some(stays))
        return before.tokens[np.repeat(stays, before.lengths)]

    def taken(self) -> Tensor:
        """Returns what the layers so far have computed, and forgets it."""
        assert self.hidden is not None  # the layers before have left it
        x, self.hidden = self.hidden, None
        return x


NOBODY = np.empty(0, dtype=np.int64)


def lay(laying: Laying, texts: Sequence[Text], owners: Array, weights: Weights, places: Places | None = None) -> list[Sheet]:
    """Returns sheets of the texts of a batch. `owners` are the numbers of their weights."""
    lengths = np.array([len(text.addresses) for text in texts])
    arrangements = [end_to_end(lengths, owners)] if laying.packing is None else laying.packing.lay(lengths, places)
    if laying.few_sizes:
        arrangements = [one.rounded_up() for one in arrangements]
    return [Sheet(laying, one, texts, weights.some(owners[one.texts])) for one in arrangements]
