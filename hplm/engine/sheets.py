"""Sheets: how the texts of a batch lie in tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from hplm.model.importance import Received
from hplm.model.layer import Attend
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.scheduling.selection import Places
from hplm.tenants.level import FULL


@dataclass
class Sheet:
    """The texts of a batch that are computed in one tensor."""

    stack: str  # that computes it
    indexes: list[int]  # of the texts in the batch
    addresses: Array  # of all these texts, end to end
    gathered: Array  # addresses of each text
    kept: Tensor | None  # the addresses whose tokens are computed; None: all
    lengths: Array  # computed tokens of each text
    tokens: Array  # the numbers of these tokens in their texts, end to end
    rooms: Array  # the length of each text with the padding behind it
    watched: list[bool]  # the texts of which it matters how much attention their tokens receive
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
    watch: Received | None = None  # of the attention that watched texts receive, once a layer has run

    def places(self) -> list[tuple[Array, Array]]:
        """Returns for each text the rows of its computed tokens in the tensors, and their numbers in the text."""
        starts, ends = np.cumsum(self.rooms) - self.rooms, np.cumsum(self.lengths)
        rows: Array = np.arange(int(ends[-1])) + np.repeat(starts - (ends - self.lengths), self.lengths)
        return list(zip(np.split(rows, ends[:-1]), np.split(self.tokens, ends[:-1]), strict=True))


@dataclass(frozen=True)
class Sheets:
    """Lays the texts of a batch into sheets: those of each stack for themselves, the shallowest stack first."""

    packing: Packing
    attention_heads: int
    device: torch.device
    dtype: torch.dtype
    few_sizes: bool = False  # round the number of rows up, because the device prepares products for each size
    depths: Mapping[str, int] = field(default_factory=lambda: {FULL: 0})  # the layers of each stack
    most_tokens: int | None = None  # of a sheet, unless it is a single text; None: any number
    stages: Sequence[torch.device] = ()  # the devices of the full stack's stages; none: one stage on `device`

    def lay(
        self,
        texts: list[Text],
        placed: Mapping[Record, Placed],
        slots: Mapping[Layout, Slots],
        arrived: dict[Layout, list[Mark]],
        which: Array | None = None,
        places: Places | None = None,
    ) -> list[Sheet]:
        """Returns sheets of the texts of a batch: of all, or of `which` indexes.

        `placed` says where their adapters and heads are. `slots` has the weights, and `arrived` their marks.
        """
        arrangements = self._arrangements(texts, np.arange(len(texts)) if which is None else which, places)
        return [self._sheet(one, [texts[i] for i in one.texts.tolist()], placed, slots, arrived) for one in arrangements]

    def order_of(self, stack: str) -> tuple[int, str]:
        """Returns the place of a stack among others: shallow ones come first."""
        return self.depths[stack], stack

    def _arrangements(self, texts: list[Text], which: Array, places: Places | None) -> list[Arrangement]:
        """Returns arrangements that name the texts by their indexes in the batch."""
        lengths = np.array([text.length for text in texts], dtype=np.int64)
        found: list[Arrangement] = []
        chosen: list[int] = which.tolist()
        for stack, own in _by_stack([texts[i].level.stack for i in chosen], self.order_of):
            # Batch and places are chosen by the work of texts, which is less than their length on other stacks.
            for some in _cut(which[own], lengths, self.most_tokens):
                arranged = self.packing.arrange(lengths[some], places if stack == FULL and len(some) == len(texts) else None)
                found += [replace(one, texts=some[one.texts]) for one in arranged]
        return [one.rounded_up() for one in found] if self.few_sizes else found

    def _sheet(
        self,
        arrangement: Arrangement,
        texts: list[Text],
        placed: Mapping[Record, Placed],
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
        gathered = np.array([len(text.addresses) for text in texts], dtype=np.int64)
        positions, kept, segments = offsets, None, np.concatenate([text.segments for text in texts])
        if any(text.kept is not None for text in texts):
            positions = np.concatenate([np.arange(text.length) if text.kept is None else text.kept for text in texts])
            kept = positions + np.repeat(np.cumsum(gathered) - gathered, lengths)
            segments = segments[kept]
        adapters = parted([placed[text.level.adapter] if text.level.adapter is not None else None for text in texts])
        heads = parted([placed[text.level.head] for text in texts])
        stack = texts[0].level.stack
        devices = self._devices(stack)
        attends = {own: arrangement.attention(self.attention_heads, own, self.dtype) for own in set(devices)}
        parts = {own: parts_of(adapters, rooms, slots, arrived, own, self.dtype) for own in set(devices)}
        return Sheet(
            stack=stack,
            indexes=arrangement.texts.tolist(),
            attend=[attends[own] for own in devices],
            addresses=np.concatenate([text.addresses for text in texts]),
            gathered=gathered,
            kept=self._index(kept) if kept is not None else None,
            lengths=lengths,
            tokens=positions,
            rooms=rooms,
            watched=[text.is_watched for text in texts],
            homes=self._index(home) if home is not None else None,
            positions=lay(positions),
            segments=lay(segments),
            reading=self._index(np.concatenate([text.reading for text in texts]) + np.repeat(starts, rows_of), devices[-1]),
            rows_of=rows_of.tolist(),
            adapters=[parts[own] for own in devices],
            reading_adapters=parts_of(adapters, rows_of, slots, arrived, devices[-1], self.dtype),
            heads=parts_of(heads, rows_of, slots, arrived, devices[-1], self.dtype),
        )

    def _devices(self, stack: str) -> Sequence[torch.device]:
        """Returns the devices of the stages that compute a stack."""
        if not self.stages:
            return [self.device]
        return self.stages if stack == FULL else self.stages[-1:]

    def _index(self, numbers: Array, device: torch.device | None = None) -> Tensor:
        return sent(tensor_of(numbers.astype(np.int64)), device or self.device)


def _by_stack(stacks: Sequence[str], order_of: Callable[[str], tuple[int, str]]) -> Iterator[tuple[str, Array]]:
    """Yields each stack in order, with the indexes of its texts."""
    different = set(stacks)
    if len(different) == 1:
        yield stacks[0], np.arange(len(stacks))
        return
    names = np.array(stacks, dtype=object)
    for stack in sorted(different, key=order_of):
        yield stack, np.flatnonzero(names == stack)


def _cut(texts: Array, lengths: Array, most: int | None) -> list[Array]:
    """Cuts texts into parts of at most so many tokens, those of like lengths together. One longer text is a part."""
    if most is None or int(lengths[texts].sum()) <= most:
        return [texts]
    ordered = texts[np.argsort(-lengths[texts], kind="stable")]
    parts: list[list[int]] = []
    room = 0
    for text, length in zip(ordered.tolist(), lengths[ordered].tolist(), strict=True):
        if not parts or length > room:
            parts.append([])
            room = most
        parts[-1].append(text)
        room -= length
    return [np.array(part) for part in parts]
