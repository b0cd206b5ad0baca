"""Staging: makes a chosen batch ready, so that the engine only computes.

It gives slots to adapters and heads, has the texts laid into sheets, and gathers their vectors. It runs for batch k+1 while
batch k computes, in the one thread that owns the slots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch

from hplm.adapters.copying import Copies, Mark
from hplm.adapters.layout import EXIT, Layout
from hplm.adapters.parts import Homes, Placed
from hplm.adapters.record import Record
from hplm.adapters.slots import Slots
from hplm.engine.backbone import Backbone
from hplm.engine.packing import Packing
from hplm.engine.request import Text
from hplm.engine.sheets import Laying, Sheet, Weights, lay
from hplm.engine.staged import StagedBatch
from hplm.engine.stages import Stage
from hplm.errors import Broken, HplmError, OutOfCapacity, for_client
from hplm.model import faults
from hplm.model.prepacked import with_rows
from hplm.plot.forest import Forest
from hplm.plot.gathering import Gatherer
from hplm.scheduling.selection import Places
from hplm.tenants.snapshot import TenantWeights

log = logging.getLogger(__name__)
NO_SLOTS = "the device has no memory for slots of another layout: give it fewer with the parameter slots"


@dataclass(frozen=True)
class StagingSettings:
    slots: int  # of each layout
    device: torch.device  # where batches enter
    dtype: torch.dtype
    resident_rows: int = 0  # of each table, on the device
    packing: Packing | None = None  # None: texts end to end
    few_sizes: bool = False  # of batches (`Sheets`)
    stages: Sequence[Stage] = ()  # of the engine; none: one stage on `device`

    def devices_of(self, layout: Layout) -> list[torch.device]:
        """Returns the device of each layer of a layout's records, if there are stages.

        Exits are where the layers behind them are. The last stage has heads.
        """
        by_layer = [stage.device for stage in self.stages for _ in range(stage.first, stage.last + 1)]
        return by_layer if layout.places or layout.kind == EXIT else by_layer[-1:] * layout.layers


class Stager:
    def __init__(self, backbone: Backbone, settings: StagingSettings) -> None:
        self._backbone = backbone
        self._settings = settings
        self._laying = Laying(
            settings.packing,
            backbone.config.heads,
            backbone.config.positions,
            settings.dtype,
            [stage.device for stage in settings.stages] or [settings.device],
            settings.few_sizes,
        )
        self._gatherer = Gatherer(settings.device, settings.dtype, settings.resident_rows)
        self._copies = Copies(settings.device)  # in a stream of its own, or staging would wait for the batch that computes
        self._slots: dict[Layout, Slots] = {}  # of all layouts ever served, so that their counts continue
        self._without_room: set[Layout] = set()
        self._pinned: Counter[Slots] = Counter()
        self._view = ref(backbone.view)  # since this view, only needed layouts have slots
        for layout in backbone.layouts:
            self._slots_for(layout)

    def stage(
        self,
        texts: Sequence[Text],
        broken: Callable[[Text, HplmError], None],
        places: Places | None = None,
    ) -> StagedBatch | None:
        """Makes a batch ready. Texts with broken stored data are passed to `broken` and left out.

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
                self.swap(batch)  # first, because its copies run in the background
                self.retrieve(batch)
            except BaseException:
                self.release(batch.held)
                raise
        return batch

    def swap(self, batch: StagedBatch) -> None:
        """Starts to copy adapters and heads into slots."""
        with batch.timed("swap"):
            for layout, marks in batch.arrived.items():
                marks += self._slots[layout].fill()

    def retrieve(self, batch: StagedBatch) -> None:
        """Gathers the vectors of all tokens."""
        with batch.timed("retrieve"), self._copies.under_way():
            for sheet in batch.sheets:
                self._retrieve(batch.forest, sheet)
            batch.ready = self._copies.mark()

    def _retrieve(self, forest: Forest, sheet: Sheet) -> None:
        sums = self._gatherer.sums(forest, sheet.addresses, sheet.lengths)
        if sheet.scattered is not None:
            sums = sums.new_zeros(sheet.rows, sums.shape[1]).index_copy_(0, sheet.scattered, sums)
        elif len(sums) < sheet.rows:
            sums = with_rows(sums, sheet.rows)
        sheet.sums = sums

    def _prepare(
        self, texts: Sequence[Text], broken: Callable[[Text, HplmError], None], places: Places | None
    ) -> StagedBatch | None:
        """Assigns slots, places and indexes. Adapters and vectors follow later."""
        held: list[tuple[Slots, int]] = []
        pinned: dict[TenantWeights, int | HplmError] = {}  # the number of each tenant's weights, or why they cannot be used
        placed: list[list[Placed | None]] = []  # by this number: where the weights are
        kept: list[int] = []
        owners: list[int] = []
        try:
            forest = self._backbone.view.forest
            for number in self._readable(forest, texts, broken):
                text = texts[number]
                owner = pinned.get(text.slot_key)
                if owner is None:
                    owner = pinned[text.slot_key] = self._pin(text, placed, held)
                if isinstance(owner, HplmError):
                    broken(text, owner)
                    continue
                kept.append(number)
                owners.append(owner)
            if not kept:
                self.release(held)
                return None
            staged = [texts[number] for number in kept]
            for own, count in zip(placed, np.bincount(owners).tolist(), strict=True):
                for layout, _ in filter(None, own):
                    self._slots[layout].hits += count - 1  # further texts of a tenant find its weights there
            slots = {layout: self._slots[layout] for own in placed for layout, _ in filter(None, own)}
            arrived: dict[Layout, list[Mark]] = {layout: [] for layout in slots}
            weights = Weights(*map(Homes.of, zip(*placed, strict=True)), slots=slots, arrived=arrived)
            sheets = lay(self._laying, staged, np.array(owners), weights, places and places.of(kept))
            return StagedBatch(staged, forest, sheets, arrived, held)
        except BaseException:
            self.release(held)
            raise

    def _pin(self, text: Text, placed: list[list[Placed | None]], held: list[tuple[Slots, int]]) -> int | HplmError:
        """Gives slots to the weights of a text. Returns their number among those of the batch, or the reason why it cannot."""
        try:
            of = text.slot_key
            own = [self._hold(record, held) if record is not None else None for record in (of.head, of.adapter, of.exits)]
        except HplmError as error:
            return error
        except Exception as error:  # such as no memory for slots of a new layout; other layouts have their slots
            log.exception("cannot get a slot")
            return OutOfCapacity(NO_SLOTS) if faults.is_out_of_memory(error) else for_client(error, "getting a slot")
        placed.append(own)
        return len(placed) - 1

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

    def _hold(self, record: Record, held: list[tuple[Slots, int]]) -> Placed:
        layout = Layout.of(record.layout)
        slots = self._slots_for(layout)
        slot = slots.hold(record, self._backbone.records)
        held.append((slots, slot))
        self._pinned[slots] += 1
        return layout, slot

    def _slots_for(self, layout: Layout) -> Slots:
        if layout not in self._slots or layout in self._without_room:
            self._allot(layout, self._settings.slots)
            self._without_room.discard(layout)
        return self._slots[layout]

    def _give_room_back(self) -> None:
        """Frees the slots of layouts that no tenant has any more. Pinned slots are freed with a later batch."""
        view, needed = self._backbone.view, self._backbone.layouts
        unneeded = self._slots.keys() - needed - self._without_room
        free = [layout for layout in unneeded if not self._pinned[self._slots[layout]]]
        if free and self._settings.device.type == "cuda":
            for device in {self._settings.device, *(stage.device for stage in self._settings.stages)}:
                torch.cuda.synchronize(device)  # copies of a failed batch may still be running
        for layout in free:
            del self._pinned[self._slots[layout]]
            self._allot(layout, 0)
            self._without_room.add(layout)
        if len(free) == len(unneeded):
            self._view = ref(view)

    def _allot(self, layout: Layout, count: int) -> None:
        before = self._slots.get(layout)
        settings = self._settings
        slots = Slots(layout, count, settings.device, layout.computed_in(settings.dtype), settings.devices_of(layout))
        if before is not None:
            slots.hits, slots.misses = before.hits, before.misses
        self._slots[layout] = slots
