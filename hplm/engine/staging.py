"""Staging: makes a chosen batch ready, so that the engine only computes.

It gathers vectors in the order of the packing, gives slots to adapters and heads, and copies index tensors to the device. It
runs for batch k+1 while batch k computes, in the one thread that owns the slots.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.copying import Copies, Mark
from hplm.adapters.groups import Groups
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.adapters.slots import Slots
from hplm.arrays import Array
from hplm.engine.backbone import Backbone, View
from hplm.engine.overlap import Overlap
from hplm.engine.packing import Arrangement, Packed, Packing
from hplm.engine.request import Text
from hplm.errors import Broken, HplmError
from hplm.model.layer import Attend
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.plot.forest import Forest
from hplm.plot.gathering import Gatherer
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


@dataclass
class StagedBatch:
    texts: list[Text]
    forest: Forest
    sheets: list[Sheet]
    arrived: dict[Layout, list[Mark]]  # the marks of its sheets' parts; empty until copying starts
    held: list[tuple[Slots, int]]
    brought: int = 0  # adapters and heads that had to be copied
    ready: Mark = field(init=False)  # after it all tensors of the sheets are on the device
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)  # start and end of each stage, in nanoseconds

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        start = time.monotonic_ns()
        yield
        self.stages[stage] = start, time.monotonic_ns()


@dataclass(frozen=True)
class StagingSettings:
    slots: int  # of each layout
    device: torch.device
    dtype: torch.dtype
    resident_rows: int = 0  # of each table, on the device
    packing: Packing = field(default_factory=Packed)
    overlap: Overlap = field(default_factory=Overlap)


class Stager:
    def __init__(self, backbone: Backbone, settings: StagingSettings) -> None:
        self._backbone = backbone
        self._settings = settings
        self._gatherer = Gatherer(settings.device, settings.dtype, settings.resident_rows)
        self._copies = Copies(settings.device)  # in a stream of its own, or staging would wait for the batch that computes
        self._slots: dict[Layout, Slots] = {}  # of all layouts ever served, so that their counts continue
        self._without_room: set[Layout] = set()
        self._pinned: Counter[Slots] = Counter()
        self._view = ref(backbone.view)  # since this view, only needed layouts have slots
        for bank in backbone.view.banks.values():
            self._slots_for(bank.layout)

    def stage(
        self, texts: Sequence[Text], broken: Callable[[Text, HplmError], None], places: Places | None = None
    ) -> StagedBatch | None:
        """Does the steps of staging that run ahead. Texts with broken stored data are passed to `broken` and left out.

        `places` are the rows and slots that the policy has chosen for these texts.
        """
        if self._view() is not self._backbone.view:
            self._give_room_back()
        start, missed = time.monotonic_ns(), self._misses()
        with self._copies.under_way():
            batch = self._prepare(texts, broken, places)
        if batch is not None:
            batch.stages["prepare"] = start, time.monotonic_ns()
            batch.brought = self._misses() - missed
            try:
                self._bring(batch, ahead=True)
            except BaseException:
                self.release(batch.held)
                raise
        return batch

    def finish(self, batch: StagedBatch) -> None:
        """Does the rest of staging when the engine is free. No other batch may be staged at the same time."""
        self._bring(batch, ahead=False)
        if not self.overlap.by_layer:
            for marks in batch.arrived.values():
                marks[-1].synchronize()

    @property
    def overlap(self) -> Overlap:
        return self._settings.overlap

    def _bring(self, batch: StagedBatch, ahead: bool) -> None:
        if self.overlap.swapping == ahead:  # first, because its copies run in the background
            with batch.timed("swap"):
                for layout, marks in batch.arrived.items():
                    marks += self._slots[layout].fill()
        if self.overlap.retrieval == ahead:
            with batch.timed("retrieve"), self._copies.under_way():
                for sheet in batch.sheets:
                    self._retrieve(batch.forest, sheet)
        batch.ready = self._copies.mark()

    def _retrieve(self, forest: Forest, sheet: Sheet) -> None:
        sums = self._gatherer.sums(forest, sheet.addresses, sheet.lengths)
        if sheet.homes is not None:
            sums = sums.new_zeros(len(sheet.positions), sums.shape[1]).index_copy_(0, sheet.homes, sums)
        sheet.sums = sums

    def _prepare(
        self, texts: Sequence[Text], broken: Callable[[Text, HplmError], None], places: Places | None
    ) -> StagedBatch | None:
        """Assigns slots, places and indexes. Adapters and vectors follow later."""
        held: list[tuple[Slots, int]] = []
        adapter_slots: list[tuple[Layout, int] | None] = []
        head_slots: list[tuple[Layout, int]] = []
        kept: list[int] = []
        try:
            forest = self._backbone.view.forest
            for number in self._readable(forest, texts, broken):
                text = texts[number]
                view, tenant = text.request.view, text.request.tenant
                try:
                    adapter = self._hold(view, tenant.adapter, held) if tenant.adapter is not None else None
                    head = self._hold(view, tenant.head, held)
                except HplmError as error:
                    broken(text, error)
                    continue
                except Exception as error:  # such as no memory for slots of a new layout; other layouts have their slots
                    broken(text, Broken(f"cannot get a slot: {error}"))
                    continue
                kept.append(number)
                adapter_slots.append(adapter)
                head_slots.append(head)
            if not kept:
                self.release(held)
                return None
            layouts = dict.fromkeys(slot[0] for slot in (*adapter_slots, *head_slots) if slot is not None)
            arrived: dict[Layout, list[Mark]] = {layout: [] for layout in layouts}
            staged = [texts[number] for number in kept]
            sheets = self._sheets(staged, adapter_slots, head_slots, arrived, places and places.of(kept))
            return StagedBatch(staged, forest, sheets, arrived, held)
        except BaseException:
            self.release(held)
            raise

    def slots(self) -> dict[Layout, Slots]:
        """Returns the slots by layout. Other threads may only read them."""
        return dict(self._slots)

    def _misses(self) -> int:
        return sum(slots.misses for slots in self._slots.values())

    @property
    def device_bytes(self) -> int:
        """The device memory of all slots, used or not."""
        return sum(slots.device_bytes for slots in self._slots.values())

    def release(self, held: list[tuple[Slots, int]]) -> None:
        while held:
            slots, slot = held.pop()
            slots.release(slot)
            self._pinned[slots] -= 1

    def _readable(self, forest: Forest, texts: Sequence[Text], broken: Callable[[Text, HplmError], None]) -> Sequence[int]:
        """Reads the rows of the texts into memory. Returns the indexes of the texts whose rows match their checksums."""
        bad = self._gatherer.broken(forest, np.concatenate([text.addresses for text in texts]))
        if not len(bad):
            return range(len(texts))
        kept: list[int] = []
        for number, text in enumerate(texts):
            mine = text.addresses[np.isin(text.addresses, bad)]
            if len(mine):
                row = forest.name_of(int(mine[0]))
                broken(text, Broken(f"{row} does not match its checksum: build or copy the table again"))
            else:
                kept.append(number)
        return kept

    def _hold(self, view: View, record: Record, held: list[tuple[Slots, int]]) -> tuple[Layout, int]:
        bank = view.banks.get(record.bank) or self._backbone.bank(record.bank)  # raises, with the reason if it cannot be opened
        slots = self._slots_for(bank.layout)
        slot = slots.hold(record, bank)
        held.append((slots, slot))
        self._pinned[slots] += 1
        return bank.layout, slot

    def _slots_for(self, layout: Layout) -> Slots:
        if layout not in self._slots or layout in self._without_room:
            self._allot(layout, self._settings.slots)
            self._without_room.discard(layout)
        return self._slots[layout]

    def _give_room_back(self) -> None:
        """Frees the slots of layouts that no bank has any more. Pinned slots are freed with a later batch."""
        view, needed = self._backbone.view, self._backbone.layouts
        unneeded = self._slots.keys() - needed - self._without_room
        free = [layout for layout in unneeded if not self._pinned[self._slots[layout]]]
        if free and self._settings.device.type == "cuda":
            torch.cuda.synchronize(self._settings.device)  # copies of a failed batch may still be running
        for layout in free:
            del self._pinned[self._slots[layout]]
            self._allot(layout, 0)
            self._without_room.add(layout)
        if len(free) == len(unneeded):
            self._view = ref(view)

    def _allot(self, layout: Layout, count: int) -> None:
        before = self._slots.get(layout)
        slots = Slots(layout, count, self._settings.device, layout.computed_in(self._settings.dtype))
        if before is not None:
            slots.hits, slots.misses = before.hits, before.misses
        self._slots[layout] = slots

    def _sheets(
        self,
        texts: list[Text],
        adapter_slots: list[tuple[Layout, int] | None],
        head_slots: list[tuple[Layout, int]],
        arrived: dict[Layout, list[Mark]],
        places: Places | None,
    ) -> list[Sheet]:
        lengths = np.array([text.tokens for text in texts], dtype=np.int64)
        return [
            self._sheet(
                arrangement,
                [texts[i] for i in arrangement.texts],
                [adapter_slots[i] for i in arrangement.texts],
                [head_slots[i] for i in arrangement.texts],
                arrived,
            )
            for arrangement in self._settings.packing.arrange(lengths, places)
        ]

    def _sheet(
        self,
        arrangement: Arrangement,
        texts: list[Text],
        adapter_slots: list[tuple[Layout, int] | None],
        head_slots: list[tuple[Layout, int]],
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
            attend=arrangement.attention(self._backbone.config.heads, self._settings.device, self._settings.dtype),
            addresses=np.concatenate([text.addresses for text in texts]),
            lengths=lengths,
            homes=self._index(home) if home is not None else None,
            positions=lay(offsets),
            segments=lay(np.concatenate([text.segments for text in texts])),
            reading=self._index(np.concatenate([text.reading for text in texts]) + np.repeat(starts, rows_of)),
            rows_of=rows_of.tolist(),
            adapters=self._parts(adapters, rooms, arrived),
            reading_adapters=self._parts(adapters, rows_of, arrived),
            heads=self._parts(heads, rows_of, arrived),
        )

    @staticmethod
    def _parted(slots: Sequence[tuple[Layout, int] | None]) -> list[tuple[Layout, Array, Array | None]]:
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
        self, parted: list[tuple[Layout, Array, Array | None]], counts: Array, arrived: dict[Layout, list[Mark]]
    ) -> list[Part]:
        """Divides the rows by layout. `counts` has the number of rows of each text."""
        parts: list[Part] = []
        for layout, slots, texts in parted:
            dtype = layout.computed_in(self._settings.dtype)
            own = counts if texts is None else counts[texts]
            groups = layout.group(np.repeat(slots, own), self._settings.device, dtype)
            rows = None
            if texts is not None:
                mine = np.zeros(len(counts), dtype=bool)
                mine[texts] = True
                rows = self._index(np.flatnonzero(np.repeat(mine, counts)))
            parts.append(Part(layout, groups, self._slots[layout].layers, arrived[layout], rows))
        return parts

    def _index(self, numbers: Array) -> Tensor:
        return sent(tensor_of(numbers.astype(np.int64)), self._settings.device)
