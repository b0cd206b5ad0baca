"""Staging: making a chosen batch ready, so that the engine only computes.

Rows become vectors in the packed batch, adapters and heads get slots, index tensors get to the device. Runs for batch k+1 while
batch k computes, in the one thread that owns the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.bank import Bank, Record
from hplm.adapters.groups import Groups
from hplm.adapters.slots import Slots
from hplm.engine.request import Work
from hplm.errors import Broken
from hplm.plot.forest import Forest, gather

Weights = list[dict[str, Tensor]]  # of each layer


@dataclass(frozen=True)
class Part:
    """The rows of a batch that one bank serves."""

    groups: Groups
    layers: Weights
    rows: Tensor | None  # None: all of them


@dataclass
class StagedBatch:
    works: list[Work]  # longest first: texts of equal length lie together
    lengths: list[int]
    sums: Tensor
    positions: Tensor
    segments: Tensor
    reading: Tensor  # index of the token that each answer row reads
    rows_of: list[int]  # answer rows of each text
    adapters: list[Part]
    heads: list[Part]
    held: list[tuple[Slots, int]] = field(default_factory=list)


class Stager:
    def __init__(
        self, forest: Forest, banks: dict[str, Bank], slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._forest = forest
        self._slots = {name: Slots(bank, slots, device, dtype) for name, bank in banks.items()}
        self._device = device
        self._dtype = dtype

    @property
    def device_bytes(self) -> int:
        return sum(slots.device_bytes for slots in self._slots.values())

    def stage(self, works: Sequence[Work], broken: Callable[[Work, Broken], None]) -> StagedBatch | None:
        """Ready to run; a text whose stored knowledge is broken is handed to `broken` and left out."""
        held: list[tuple[Slots, int]] = []
        adapter_slots: list[tuple[str, int] | None] = []
        head_slots: list[tuple[str, int]] = []
        kept: list[Work] = []
        try:
            for work in sorted(works, key=lambda work: -work.tokens):
                tenant = work.request.tenant
                try:
                    adapter = self._hold(tenant.adapter, held) if tenant.adapter is not None else None
                    head = self._hold(tenant.head, held)
                except Broken as error:
                    broken(work, error)
                    continue
                kept.append(work)
                adapter_slots.append(adapter)
                head_slots.append(head)
            if not kept:
                self.release(held)
                return None
            return self._pack(kept, adapter_slots, head_slots, held)
        except BaseException:
            self.release(held)
            raise

    def release(self, held: list[tuple[Slots, int]]) -> None:
        while held:
            slots, slot = held.pop()
            slots.release(slot)

    def _hold(self, record: Record, held: list[tuple[Slots, int]]) -> tuple[str, int]:
        slots = self._slots.get(record.bank)
        if slots is None:
            raise Broken(f"bank {record.bank} could not be opened when the server started")
        slot = slots.hold(record)
        held.append((slots, slot))
        return record.bank, slot

    def _pack(
        self,
        works: list[Work],
        adapter_slots: list[tuple[str, int] | None],
        head_slots: list[tuple[str, int]],
        held: list[tuple[Slots, int]],
    ) -> StagedBatch:
        lengths = np.array([work.tokens for work in works], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        addresses = np.concatenate([work.addresses for work in works])
        rows_of = np.array([len(work.spans) for work in works], dtype=np.int64)
        # A row without a token of its own reads the first one; the answer leaves it out again.
        read = [np.maximum(work.spans[:, 0], 0) + start for work, start in zip(works, starts, strict=True)]
        return StagedBatch(
            works=works,
            lengths=lengths.tolist(),
            sums=gather(self._forest, addresses, lengths, self._dtype).to(self._device),
            positions=self._index(np.arange(int(lengths.sum())) - np.repeat(starts, lengths)),
            segments=self._index(np.concatenate([work.segments for work in works])),
            reading=self._index(np.concatenate(read)),
            rows_of=rows_of.tolist(),
            adapters=self._parts(adapter_slots, lengths),
            heads=self._parts(head_slots, rows_of),
            held=held,
        )

    def _parts(self, slots: Sequence[tuple[str, int] | None], lengths: np.ndarray) -> list[Part]:
        """Rows by bank; `lengths` says how many rows each text has."""
        parts = []
        for bank in sorted({slot[0] for slot in slots if slot is not None}):
            mine = np.array([slot is not None and slot[0] == bank for slot in slots])
            slot_of_text = np.array([slot[1] for slot in slots if slot is not None and slot[0] == bank])
            groups = Groups(np.repeat(slot_of_text, lengths[mine]), self._device)
            rows = None if mine.all() else self._index(np.flatnonzero(np.repeat(mine, lengths)))
            parts.append(Part(groups, self._slots[bank].layers, rows))
        return parts

    def _index(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)
