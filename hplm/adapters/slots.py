"""Slots: the bounded set of records that lie on the device, least recently used out first.

Owned by one thread.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from hplm.adapters.bank import Bank, Record
from hplm.adapters.layout import Layout
from hplm.errors import HplmError


class SlotsTaken(HplmError):
    """Every slot is pinned by a batch in flight: more different records than the batches were promised room for."""


class Slots:
    """For the records of one layout, whichever banks they lie in."""

    def __init__(self, layout: Layout, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self._layout = layout
        self._arrival = layout.empty(pin=device.type == "cuda")
        self._by_layer = layout.unpack(self._arrival)
        self.layers: list[dict[str, Tensor]] = [
            {name: torch.zeros(count, *shape, device=device, dtype=dtype) for name, shape in layout.shapes.items()}
            for _ in range(layout.layers)
        ]
        self._slot_of: OrderedDict[Record, int] = OrderedDict()  # least recently used first
        self._pins = [0] * (count)
        self._empty = list(range(count))

    @property
    def device_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def hold(self, record: Record, bank: Bank) -> int:
        """The record's slot, filled if need be, and pinned until `release`. Raises Broken if the record is."""
        slot = self._slot_of.get(record)
        if slot is None:
            bank.read(record, self._arrival)
            slot = self._free_slot()
            for target, source in zip(self.layers, self._by_layer, strict=True):
                for name, tensor in target.items():
                    tensor[slot].copy_(source[name])  # blocking: the arrival buffer is used again at once
            self._slot_of[record] = slot
        else:
            self._slot_of.move_to_end(record)
        self._pins[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._pins[slot] -= 1

    def _free_slot(self) -> int:
        if self._empty:
            return self._empty.pop()
        for record, slot in self._slot_of.items():
            if not self._pins[slot]:
                del self._slot_of[record]
                return slot
        raise SlotsTaken(f"all {len(self._pins)} slots for {self._layout.file_name} are in use: raise 'slots'")
