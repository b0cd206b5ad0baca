"""Slots: a limited number of records on the device. The least recently used record is replaced first.

One thread owns them. `hold` reads a missing record into host memory and reserves a slot for it. `fill` starts the copies to all
reserved slots, layer by layer. So a batch computes its first layer while the weights of the next layer are copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.adapters.records import Records
from hplm.errors import OutOfCapacity


class CopyEvent:
    """A point in the order of copies. Without an event, all copies before it are done."""

    def __init__(self, event: torch.cuda.Event | torch.Event | None = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Makes the device wait for the event before it runs the calling thread's next work."""
        event = self._event
        if event is not None and event.query():
            self._event = None  # most batches use weights that have long arrived: nothing asks again
        elif event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Blocks the calling thread until the event is reached."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


AT_ONCE, REACHED = nullcontext(), CopyEvent()


class Copies:
    """Starts copies to slots, on CUDA in a stream beside the computing one, and records events between them.

    Waiting for an event is waiting for all copies before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # it may still clear the slots

    def under_way(self) -> AbstractContextManager[object]:
        return AT_ONCE if self._stream is None else torch.cuda.stream(self._stream)

    def record_event(self) -> CopyEvent:
        return REACHED if self._stream is None else CopyEvent(self._stream.record_event(), self._device)


class SlotsTaken(OutOfCapacity):
    """Every slot is pinned by a batch in flight: the batches have more different records than there are slots."""


class Arrival:
    """Host memory for one record."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.record = layout.empty(pin=device.type == "cuda")
        # A CPU turns one kind of 16 bits into the other number by number, but from and to 32 bits many at once.
        self._read = self.record if device.type != "cpu" else self.record.float()
        self.layers = [list(tensors.values()) for tensors in layout.unpack(self._read)]

    def read(self, record: Record, records: Records) -> None:
        records.read(record, self.record)
        if self._read is not self.record:
            self._read.copy_(self.record)


class Slots:
    """The slots for all records of one layout."""

    def __init__(
        self, layout: Layout, count: int, device: torch.device, dtype: torch.dtype, devices: Sequence[torch.device] = ()
    ) -> None:
        """`devices`: of each layer, if they are not all on `device`. A slot has the same number on all of them."""
        self.layout, self.count = layout, count
        self._devices = list(devices) or [device] * layout.layers
        self.way = layout.way(self._devices[0], dtype)  # how it maps rows
        self.layers: list[dict[str, Tensor]] = layout.allocate(count, self._devices, dtype)
        self._filled = [  # what a record fills of each tensor. The rest stays zero
            [tensors[name][(slice(None), *map(slice, shape))] for name, shape in layout.shapes.items()]
            for tensors in self.layers
        ]
        self._slot_of: OrderedDict[Record, int] = OrderedDict()  # least recently used first
        self._pins = [0] * count
        self._empty = list(reversed(range(count)))  # low slots first: weights of consecutive slots need no copy
        self._copies = {device: Copies(device) for device in dict.fromkeys(self._devices)}
        self._arrivals: list[Arrival] = []  # host memory for as many records as any batch has missed
        self._promised: list[tuple[int, Arrival]] = []
        self._events = [REACHED] * layout.layers  # the end of the last copies to each layer
        self.hits = self.misses = 0

    @property
    def device_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    @property
    def awaited(self) -> int:
        """The number of held records that are not copied yet."""
        return len(self._promised)

    @property
    def used(self) -> int:
        return len(self._slot_of)

    @property
    def pinned(self) -> bool:
        """Whether any slot is held."""
        return any(self._pins)

    @property
    def records(self) -> list[Record]:
        """The records that have a slot."""
        return list(self._slot_of)

    def hold(self, record: Record, records: Records) -> int:
        """Returns the record's slot, pinned until `release`. The slot has the record after `fill`.

        Raises Broken if the record is broken.
        """
        slot = self._slot_of.get(record)
        if slot is None:
            arrival = self._arrival()
            arrival.read(record, records)
            slot = self._free_slot()
            self._promised.append((slot, arrival))
            self._slot_of[record] = slot
            self.misses += 1
        else:
            self._slot_of.move_to_end(record)
            self.hits += 1
        self._pins[slot] += 1
        return slot

    def fill(self) -> list[CopyEvent]:
        """Starts the copies to all reserved slots. A layer of any held record may be used after that layer's event."""
        if not self._promised:
            return self._events
        events: list[CopyEvent] = []
        for device, numbers in groupby(range(len(self.layers)), self._devices.__getitem__):
            with self._copies[device].under_way():
                for number in numbers:
                    for slot, arrival in self._promised:
                        for tensor, own in zip(self._filled[number], arrival.layers[number], strict=True):
                            # Copied first and converted on the device. Otherwise the host would convert, and wait.
                            tensor.select(0, slot).copy_(own.to(device, non_blocking=True))
                    events.append(self._copies[device].record_event())
        self._promised.clear()
        self._events = events
        return events

    def release(self, slot: int) -> None:
        """Gives a held slot back. What has read it must be computed by then: copies into it wait for no computing."""
        self._pins[slot] -= 1

    def _arrival(self) -> Arrival:
        for event in self._events:  # copies may still read the arrivals
            event.synchronize()
        self._events = [REACHED] * len(self.layers)
        if len(self._promised) == len(self._arrivals):
            self._arrivals.append(Arrival(self.layout, self._devices[0]))
        return self._arrivals[len(self._promised)]

    def _free_slot(self) -> int:
        if self._empty:
            return self._empty.pop()
        for record, slot in self._slot_of.items():
            if not self._pins[slot]:
                del self._slot_of[record]
                return slot
        raise SlotsTaken(f"all {self.count} slots for {self.layout.name} are in use: increase 'slots'")
