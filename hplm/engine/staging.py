"""Staging: makes a chosen batch ready, so that the engine only computes.

It gives slots to adapters and heads, has the texts laid into sheets, and gathers their vectors. It runs for batch k+1 while
batch k computes, in the one thread that owns the slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from weakref import ref

import numpy as np
import torch

from hplm.adapters.layout import Layout
from hplm.adapters.layout_rows import RecordSlot
from hplm.adapters.slots import Copies, CopyEvent, Slots
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.laid import Laid, Records, StagingSettings
from hplm.engine.packing import Arrangement, divided, end_to_end
from hplm.engine.request import FIRST, Text
from hplm.engine.sheets import Sheet, StagedBatch
from hplm.errors import HplmError
from hplm.model import faults
from hplm.plot.gathering import Gatherer
from hplm.scheduling.selection import Places
from hplm.tenants.snapshot import TenantWeights

MOST_LONE = 1024  # lengths and tenants of lone texts that are remembered: some 10 KB each
NO_SLOTS = "; the device has no memory for slots of another layout: give it fewer with the parameter slots"


class EncoderStager:
    def __init__(
        self, backbone: Backbone, settings: StagingSettings, copies: Callable[[torch.device], Copies] = Copies
    ) -> None:
        self._backbone = backbone
        self._settings = settings
        self._gatherer = Gatherer(settings.device, settings.dtype, settings.resident_rows)
        self._copies = copies(settings.device)  # in a stream of its own, or staging would wait for the batch that computes
        self._slots: dict[Layout, Slots] = {}  # of all layouts ever served, so that their counts continue
        self._slots_of: dict[str, Slots] = {}  # by the key of a layout, since slots were last allotted
        self._lone: dict[Hashable, Laid] = {}  # by what decides how a lone text lies, since slots were last allotted
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
        start = time.monotonic_ns()
        held: list[tuple[Slots, int]] = []
        try:
            with self._copies.under_way():
                batch = self._prepare(texts, broken, places, held)
            if batch is None:
                self.release(held)
                return None
            batch.stages["prepare"] = start, time.monotonic_ns()
            self.swap(batch)  # first, because its copies run in the background
            self.retrieve(batch)
            return batch
        except BaseException:
            self.release(held)
            self._lone.clear()  # whose adapters may not have been copied
            raise

    def swap(self, batch: StagedBatch) -> None:
        """Starts to copy adapters and heads into slots."""
        start = time.monotonic_ns()
        for slots, events in batch.arrived.items():
            batch.brought += slots.awaited
            events += slots.fill()
        batch.stages["swap"] = start, time.monotonic_ns()

    def retrieve(self, batch: StagedBatch) -> None:
        """Gathers the vectors of all tokens."""
        start = time.monotonic_ns()
        with self._copies.under_way():
            for sheet in batch.sheets:
                rows = sheet.rows if sheet.scattered is None else len(sheet.addresses)
                sums = self._gatherer.sums(batch.forest, sheet.addresses, sheet.lengths, rows)
                if sheet.scattered is not None:
                    sums = sums.new_zeros(sheet.rows, sums.shape[1]).index_copy_(0, sheet.scattered, sums)
                sheet.sums = sums
            batch.ready = self._copies.record_event()
        batch.stages["retrieve"] = start, time.monotonic_ns()

    def _prepare(
        self,
        texts: Sequence[Text],
        broken: Callable[[Text, HplmError], None],
        places: Places | None,
        held: list[tuple[Slots, int]],
    ) -> StagedBatch | None:
        """Assigns slots, places and indexes. Adapters and vectors follow later."""
        record_slots: list[list[RecordSlot | None]] = []  # by this number: where the weights are
        kept: list[int] = []
        tenants: list[int] = []
        forest = self._backbone.view.forest
        addresses = [text.addresses for text in texts]
        readable = self._gatherer.readable(forest, addresses, lambda number, error: broken(texts[number], error))
        # The number of each tenant's weights, or why they cannot be used.
        pinned = {
            key: self._pin(key, record_slots, held) for key in dict.fromkeys([texts[number].slot_key for number in readable])
        }
        for number in readable:
            tenant = pinned[texts[number].slot_key]
            if isinstance(tenant, HplmError):
                broken(texts[number], tenant)
                continue
            kept.append(number)
            tenants.append(tenant)
        if not kept:
            return None
        for own, count in zip(record_slots, np.bincount(tenants).tolist(), strict=True):
            for slots, _ in filter(None, own) if count > 1 else ():
                slots.hits += count - 1  # further texts of a tenant find its weights there
        staged = [texts[number] for number in kept]
        arrived: dict[Slots, list[CopyEvent]] = {slots: [] for slots, _ in held}
        sheets = self._sheets(staged, np.array(tenants), record_slots, arrived, places and places.of(kept))
        return StagedBatch(staged, forest, sheets, arrived, held)

    def _sheets(
        self,
        texts: Sequence[Text],
        tenants: Array,
        record_slots: Sequence[Records],
        arrived: Mapping[Slots, list[CopyEvent]],
        places: Places | None,
    ) -> list[Sheet]:
        """Lays texts into sheets. A lone text lies as the last one of its length and tenant did."""
        own = self._settings, self._backbone.config
        key = self._key_of(texts[0], record_slots[0]) if len(texts) == 1 else None
        if key is not None and (kept := self._lone.get(key)) is not None:
            return [Sheet(*own, kept.arrangement, texts, lambda arrangement, texts: kept)]

        def lie(arrangement: Arrangement, texts: Sequence[Text]) -> Laid:
            return Laid(*own, arrangement, texts, tenants[arrangement.texts], record_slots, arrived)

        sheets = [Sheet(*own, one, texts, lie) for one in self._arranged(texts, tenants, places)]
        if key is not None:
            if len(self._lone) == MOST_LONE:
                del self._lone[next(iter(self._lone))]
            self._lone[key] = sheets[0].laid
        return sheets

    def _key_of(self, text: Text, records: Records) -> Hashable:
        """Returns what decides how a lone text lies. None: more does, or copies of it must be waited for."""
        settings = self._settings
        is_plain = text.plan is None and not text.depth and (text.is_pooled or text.reading is FIRST)
        if settings.packing is not None or settings.sends_together or not is_plain:
            return None
        return len(text.addresses), text.is_pooled, *records

    def _arranged(self, texts: Sequence[Text], tenants: Array, places: Places | None) -> list[Arrangement]:
        lengths, settings = np.array([len(text.addresses) for text in texts]), self._settings
        if settings.packing is None:
            arrangements = divided(end_to_end(lengths, tenants, settings.recorded), settings.threads)
        else:
            arrangements = settings.packing.lay(lengths, places)
        return [one.rounded_up() for one in arrangements] if settings.few_sizes else arrangements

    def _pin(
        self, weights: TenantWeights, record_slots: list[list[RecordSlot | None]], held: list[tuple[Slots, int]]
    ) -> int | HplmError:
        """Gives slots to weights. Returns their number among those of the batch, or the reason why it cannot."""
        own: list[RecordSlot | None] = []
        try:
            for record in (weights.head, weights.adapter, weights.exits):
                if record is None:
                    own.append(None)
                    continue
                slots = self._slots_of.get(record.layout) or self._slots_for(Layout.of(record.layout))
                held.append((slots, slots.hold(record, self._backbone.records)))
                own.append(held[-1])
        except HplmError as error:
            return error
        except Exception as error:  # such as no memory for slots of a new layout; other layouts have their slots
            return faults.failure("getting a slot", error, NO_SLOTS)
        record_slots.append(own)
        return len(record_slots) - 1

    def slots(self) -> dict[Layout, Slots]:
        """Returns the slots by layout. Other threads may only read them."""
        return dict(self._slots)

    @property
    def device_bytes(self) -> int:
        """The device memory of all slots, used or not."""
        return sum(slots.device_bytes for slots in self._slots.values())

    def release(self, held: list[tuple[Slots, int]]) -> None:
        while held:
            slots, slot = held.pop()
            slots.release(slot)

    def _slots_for(self, layout: Layout) -> Slots:
        slots = self._slots.get(layout)
        if slots is None or not slots.count:
            slots = self._allot(layout, self._settings.slots)
        self._slots_of[layout.key] = slots
        return slots

    def _give_room_back(self) -> None:
        """Frees the slots of layouts that no tenant has any more. Pinned slots are freed with a later batch."""
        view, needed, settings = self._backbone.view, self._backbone.layouts, self._settings
        unneeded = [slots for layout, slots in self._slots.items() if layout not in needed and slots.count]
        free = [slots for slots in unneeded if not slots.pinned]
        if free and settings.device.type == "cuda":
            for device in {settings.device, *settings.devices}:
                torch.cuda.synchronize(device)  # copies of a failed batch may still be running
        for slots in free:
            self._allot(slots.layout, 0)
        if len(free) == len(unneeded):
            self._view = ref(view)

    def _allot(self, layout: Layout, count: int) -> Slots:
        self._slots_of.clear()
        self._lone.clear()
        before, settings = self._slots.get(layout), self._settings
        devices = settings.devices_of(layout)
        slots = self._slots[layout] = Slots(layout, count, settings.device, layout.computed_in(settings.dtype), devices)
        if before is not None:
            slots.hits, slots.misses = before.hits, before.misses
        return slots
