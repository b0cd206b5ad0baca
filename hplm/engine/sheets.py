"""Staged batches: all that the engine needs of them, how their texts lie in tensors, and which of these are still there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.layout import EXIT, Layout
from hplm.adapters.layout_rows import LayoutRows, RecordSlot, rows_by_layout
from hplm.adapters.slots import CopyEvent, Slots
from hplm.arrays import Array, joined, padded, together
from hplm.engine.packing import Arrangement, Packing
from hplm.engine.request import Text
from hplm.engine.stages import Stage
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.cpu import Computing
from hplm.model.layer import Attend
from hplm.model.tensors import Block, rounded_up, sent
from hplm.plot.forest import Forest
from hplm.scheduling.selection import Batch

NOBODY = np.empty(0, dtype=np.int64)
HEAD, ADAPTER, EXITS = range(3)  # a tenant's records
ROOM, TOKEN_ROOM = 1 << 14, 64  # bytes for what a sheet sends, and for each of its tokens


@dataclass(frozen=True)
class StagingSettings:
    slots: int  # of each layout
    device: torch.device  # where batches enter
    dtype: torch.dtype
    resident_rows: int = 0  # of each table, on the device
    packing: Packing | None = None  # None: texts end to end
    few_sizes: bool = False  # round the number of rows up, because the device prepares products for each size
    stages: Sequence[Stage] = ()  # of the engine; none: one stage on `device`
    threads: int = 1  # that compute sheets of a batch side by side

    @cached_property
    def recorded(self) -> bool:
        """Whether batches should have few shapes, because the engine records what they compute (`hplm.engine.graphs`)."""
        return self.few_sizes and self.device.type == "cuda"

    @cached_property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return [stage.device for stage in self.stages] or [self.device]

    def devices_of(self, layout: Layout) -> list[torch.device]:
        """Returns the device of each layer of a layout's records, if there are stages.

        Exits are where the layers behind them are. The last stage has heads.
        """
        by_layer = [stage.device for stage in self.stages for _ in range(stage.first, stage.last + 1)]
        return by_layer[: layout.layers] if layout.places or layout.kind == EXIT else by_layer[-1:] * layout.layers


class Sheet:
    """The texts of a batch that are computed in one tensor. Those that leave at an exit are taken out."""

    sums: Tensor | None = None  # None: not yet gathered
    numbers: Tensor | None = None  # all that the layers read beside the sums and weights; None: it is not in one tensor
    shape: Hashable = None  # on which their kernels depend beside that; None: on more
    hidden: Tensor | None = None  # of the texts that have not left: what the layers so far have computed

    def __init__(
        self,
        settings: StagingSettings,
        config: BackboneConfig,
        arrangement: Arrangement,
        texts: Sequence[Text],
        tenants: Array,
        record_slots: Sequence[Sequence[RecordSlot | None]],
        arrived: Mapping[Slots, list[CopyEvent]],
    ) -> None:
        """`texts`: of the whole batch. `tenants`: the numbers of their tenants. `record_slots`: the records of each.

        `arrived` has empty lists until copying starts.
        """
        self._settings, self._config, self._record_slots, self._arrived = settings, config, record_slots, arrived
        self.indexes: list[int] = arrangement.texts.tolist()  # of its texts in the batch
        self.texts = [texts[index] for index in self.indexes]
        self.addresses = joined([text.addresses for text in self.texts])
        self.lengths = arrangement.lengths  # of all its texts, also of those that have left
        self.rows = arrangement.rows  # of its tensors, padding included
        tokens = arrangement.tokens if arrangement.is_scattered else slice(len(self.addresses))
        places = joined([text.segments for text in self.texts]).astype(np.int64)
        if config.has_places:
            places = arrangement.offsets + places * config.positions
        first = settings.devices[0]
        # If some may leave, each text has a row: the exit where it may, and how many layers it passes (0: all).
        self.may_leave = any([text.plan is not None or text.depth for text in self.texts])
        self._ways = np.array([(text.exit, text.depth) for text in self.texts] if self.may_leave else [])
        # A packing of others may compute at once on what it has sent. That arrives only when a block closes.
        is_block = settings.packing is None and (first.type == "cuda" or settings.recorded)
        with Block(first, ROOM + TOKEN_ROOM * self.rows) if is_block else nullcontext() as block:
            # The row of each token in the engine's table of positions and segments.
            self.places = sent(self._by_row(places, arrangement), first)
            # The row of each token in the tensor; None: in order, with padding behind the last one only.
            self.scattered = None if isinstance(tokens, slice) else sent(tokens, first)
            self._lie(arrangement, tenants[arrangement.texts])
            if not self.may_leave:  # all come to the end, which can be prepared ahead
                _, _, adapters = self.ending
                if block is not None and settings.recorded:
                    self._note_shape(block, self.attend[0], [*self.adapters[0], *adapters])
                _ = self.heads

    @staticmethod
    def _by_row(values: Array, arrangement: Arrangement) -> Array:
        """Returns what tokens have by the rows of a tensor, with zeros where there is padding."""
        if len(values) == arrangement.rows:
            return values
        found = np.zeros(arrangement.rows, dtype=np.int64)
        found[arrangement.tokens] = values
        return found

    def _lie(self, arrangement: Arrangement, tenants: Array) -> None:
        """Notes where the texts lie that have not left, and prepares attention and adapters for them."""
        self._arrangement, self._tenants, self._runs = arrangement, tenants, _starts_of_runs(tenants)
        self.rows_of = np.array([len(text.reading) for text in self.texts])  # rows that each text reads
        is_pooled = [text.is_pooled for text in self.texts]
        self.pools = any(is_pooled)  # whether some texts read more rows than they answer with
        self.answer_rows = np.where(is_pooled, 1, self.rows_of) if self.pools else self.rows_of  # of each text
        devices, dtype = self._settings.devices, self._settings.dtype
        by_device = {
            own: (
                arrangement.attention(self._config.heads, own, dtype),
                self._parts(ADAPTER, arrangement.rooms, own),
                None if self._config.has_places else sent(self._by_row(arrangement.offsets, arrangement), own),
            )
            for own in dict.fromkeys(devices)
        }
        self.attend: list[Attend] = [by_device[own][0] for own in devices]  # of each stage
        self.adapters: list[list[LayoutRows]] = [by_device[own][1] for own in devices]
        self.positions: list[Tensor | None] = [by_device[own][2] for own in devices]  # in their texts, where layers turn them
        for name in ("ending", "heads"):
            self.__dict__.pop(name, None)

    def _note_shape(self, block: Block, attend: Attend, parts: list[LayoutRows]) -> None:
        """Notes what decides which kernels the layers are, if it is few numbers."""
        self.numbers = block.so_far
        if (
            isinstance(attend, PackedAttention)
            and attend.few_shapes
            and not block.is_full
            and all(part.groups.is_recordable for part in parts)
        ):
            addresses = [tensor.data_ptr() for part in self.adapters[0] for layer in part.layers for tensor in layer.values()]
            layouts = [(part.layout, part.rows is None) for part in parts]
            self.shape = (self.rows, attend.longest, *block.taken, *layouts, *addresses)

    @cached_property
    def ending(self) -> tuple[Tensor, Attend, list[LayoutRows]]:
        """The tokens that answers read, attention of these tokens, and their adapters. Further rows are not read."""
        last, counts, attend = self._settings.devices[-1], self.rows_of, self.attend[-1]
        reading = together([text.reading for text in self.texts])
        if isinstance(attend, PackedAttention):
            attend = partial(attend, reads=np.maximum.reduceat(reading, counts.cumsum() - counts) + 1)
        reading = reading + self._arrangement.starts.repeat(counts)
        if self._settings.recorded and (more := rounded_up(len(reading)) - len(reading)):
            reading, counts = padded(reading, len(reading) + more), np.append(counts[:-1], counts[-1] + more)
        return sent(reading, last), attend, self._parts(ADAPTER, counts, last)

    @cached_property
    def heads(self) -> list[LayoutRows]:
        """The heads of the answer rows."""
        return self._parts(HEAD, self.answer_rows, self._settings.devices[-1])

    def _parts(self, which: int, counts: Array, device: torch.device, asked: Array | None = None) -> list[LayoutRows]:
        """`counts`: rows of each text, or of each that is asked."""
        tenants, runs = self._tenants, self._runs
        if asked is not None:
            tenants = tenants[asked]
            runs = _starts_of_runs(tenants)
        own: list[int] = tenants[runs].tolist()
        record_slots = [self._record_slots[tenant][which] for tenant in own]
        return rows_by_layout(record_slots, np.add.reduceat(counts, runs).tolist(), self._arrived, device)

    def asked(self, exit: int) -> Array:
        """Returns the numbers of the texts that may leave at an exit."""
        return np.flatnonzero(self._ways[:, 0] == exit)

    def done(self, layers: int) -> Array:
        """Returns the numbers of the texts that pass so many layers."""
        return NOBODY if not layers else np.flatnonzero(self._ways[:, 1] == layers)

    def reads(self, numbers: Array, which: int, stage: int = -1) -> tuple[Array, Array, list[LayoutRows]]:
        """Returns what heads of a stage read of these texts: the token of each row, how many rows each has, and the heads."""
        rows_of = self.rows_of[numbers]
        texts: list[int] = numbers.tolist()
        own: Array = np.concatenate([self.texts[text].reading for text in texts])
        reading = own + np.repeat(self._arrangement.starts[numbers], rows_of)
        return reading, rows_of, self._parts(which, rows_of, self._settings.devices[stage], numbers)

    def lie(self, numbers: Array) -> tuple[Array, Array]:
        """Returns where these texts begin, and their lengths."""
        return self._arrangement.starts[numbers], self._arrangement.lengths[numbers]

    def leave(self, numbers: Array) -> Array:
        """Takes texts out. Returns the rows of the others, which lie end to end from now on, without padding."""
        stays: Array = np.ones(len(self.texts), dtype=bool)
        stays[numbers] = False
        before = self._arrangement
        self.texts, self.indexes = list(compress(self.texts, stays)), list(compress(self.indexes, stays))
        self._ways = self._ways[stays]
        if self.texts:
            lengths = before.lengths[stays]
            self._lie(Arrangement(before.texts[stays], lengths, lengths), self._tenants[stays])
        return before.tokens[np.repeat(stays, before.lengths)]

    def taken(self) -> Tensor:
        """Returns what the layers so far have computed, and forgets it."""
        assert self.hidden is not None  # the layers before have left it
        x, self.hidden = self.hidden, None
        return x


@dataclass
class StagedBatch:
    texts: list[Text]
    forest: Forest
    sheets: list[Sheet]
    arrived: Mapping[Slots, list[CopyEvent]]  # the events of its sheets' parts
    held: list[tuple[Slots, int]]
    brought: int = 0  # adapters and heads that had to be copied
    ready: CopyEvent = field(init=False)  # after it all tensors of the sheets are on the device
    batch: Batch[Text] = field(init=False)  # that was chosen: these are its texts that have no answer yet
    number: int = 0  # of the batch, once it has started
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)  # start and end of each step, in nanoseconds
    gone: set[int] = field(default_factory=set[int])  # the indexes of texts that are answered, or soon will be
    computing_ns: list[int] = field(default_factory=list)  # how long each stage of the engine has computed it
    under_way: Computing[Any] | None = None  # what the engine's threads compute of it side by side

    @property
    def unanswered(self) -> list[Text]:
        """The texts that are still to be answered."""
        return [text for index, text in enumerate(self.texts) if index not in self.gone]

    @property
    def tokens(self) -> int:
        return sum([len(sheet.addresses) for sheet in self.sheets])


def _starts_of_runs(tenants: Array) -> Array:
    """Returns the first of each run of texts with one tenant."""
    changes = np.empty(len(tenants), dtype=bool)
    changes[:1] = True
    np.not_equal(tenants[1:], tenants[:-1], out=changes[1:])
    return changes.nonzero()[0]
