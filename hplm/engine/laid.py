"""How texts lie in a tensor, and what the layers need for it: attention, adapters and heads of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from hplm.adapters.layout import EXIT, Layout
from hplm.adapters.layout_rows import LayoutRows, RecordSlot, rows_by_layout
from hplm.adapters.slots import CopyEvent, Slots
from hplm.arrays import Array, padded, together
from hplm.engine.packing import Arrangement, Packing
from hplm.engine.request import Text
from hplm.engine.stages import Stage
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.layer import Attend
from hplm.model.tensors import rounded_up, sent

HEAD, ADAPTER, EXITS = range(3)  # a tenant's records
Records = Sequence[RecordSlot | None]  # of a tenant: where each of them is


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
    def sends_together(self) -> bool:
        """Whether one copy brings all that a sheet sends. A packing of others may compute at once on what it has sent."""
        return self.packing is None and (self.device.type == "cuda" or self.recorded)

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


class Laid:
    """Texts in a tensor. It keeps nothing of what they say: others of the same lengths, rows and tenants lie alike."""

    def __init__(
        self,
        settings: StagingSettings,
        config: BackboneConfig,
        arrangement: Arrangement,
        texts: Sequence[Text],
        tenants: Array,
        record_slots: Sequence[Records],
        arrived: Mapping[Slots, Sequence[CopyEvent]],
    ) -> None:
        """`texts`: in their order in the tensor. `tenants`: the number of each text's tenant. `record_slots`: of each tenant.

        `arrived` has empty lists until copying starts.
        """
        self._settings, self._config, self._record_slots, self._arrived = settings, config, record_slots, arrived
        self.arrangement, self._tenants, self._runs = arrangement, tenants, _starts_of_runs(tenants)
        self._readings = [text.reading for text in texts]
        self.rows_of = np.array([len(own) for own in self._readings])  # rows that each text reads
        is_pooled = [text.is_pooled for text in texts]
        self.pools = any(is_pooled)  # whether some texts read more rows than they answer with
        self.answer_rows = np.where(is_pooled, 1, self.rows_of) if self.pools else self.rows_of  # of each text
        by_device = {
            own: (
                arrangement.attention(config.heads, own, settings.dtype),
                self._parts(ADAPTER, arrangement.rooms, own),
                None if config.has_places else sent(arrangement.by_row(arrangement.offsets), own),
            )
            for own in dict.fromkeys(settings.devices)
        }
        self.attend: list[Attend] = [by_device[own][0] for own in settings.devices]  # of each stage
        self.adapters: list[list[LayoutRows]] = [by_device[own][1] for own in settings.devices]
        # In their texts, where layers turn them.
        self.positions: list[Tensor | None] = [by_device[own][2] for own in settings.devices]

    @cached_property
    def ending(self) -> tuple[Tensor, Attend, list[LayoutRows]]:
        """The tokens that answers read, attention of these tokens, and their adapters. Further rows are not read."""
        last, counts, attend = self._settings.devices[-1], self.rows_of, self.attend[-1]
        reading = together(self._readings)
        if isinstance(attend, PackedAttention):
            attend = partial(attend, reads=np.maximum.reduceat(reading, counts.cumsum() - counts) + 1)
        reading = reading + self.arrangement.starts.repeat(counts)
        if self._settings.recorded and (more := rounded_up(len(reading)) - len(reading)):
            reading, counts = padded(reading, len(reading) + more), np.append(counts[:-1], counts[-1] + more)
        return sent(reading, last), attend, self._parts(ADAPTER, counts, last)

    @cached_property
    def heads(self) -> list[LayoutRows]:
        """The heads of the answer rows."""
        return self._parts(HEAD, self.answer_rows, self._settings.devices[-1])

    def reads(self, numbers: Array, which: int, stage: int = -1) -> tuple[Array, Array, list[LayoutRows]]:
        """Returns what heads of a stage read of these texts: the token of each row, how many rows each has, and the heads."""
        rows_of = self.rows_of[numbers]
        texts: list[int] = numbers.tolist()
        own: Array = np.concatenate([self._readings[text] for text in texts])
        reading = own + np.repeat(self.arrangement.starts[numbers], rows_of)
        return reading, rows_of, self._parts(which, rows_of, self._settings.devices[stage], numbers)

    def places_of(self, numbers: Array) -> tuple[Array, Array]:
        """Returns where these texts begin, and their lengths."""
        return self.arrangement.starts[numbers], self.arrangement.lengths[numbers]

    def rest(self, stays: Array, texts: Sequence[Text]) -> Laid:
        """Returns how the `texts` that stay lie when the others have gone: end to end, without padding."""
        before = self.arrangement
        lengths = before.lengths[stays]
        own = Arrangement(before.texts[stays], lengths, lengths), texts, self._tenants[stays]
        return Laid(self._settings, self._config, *own, self._record_slots, self._arrived)

    def _parts(self, which: int, counts: Array, device: torch.device, asked: Array | None = None) -> list[LayoutRows]:
        """`counts`: rows of each text, or of each that is asked."""
        tenants, runs = self._tenants, self._runs
        if asked is not None:
            tenants = tenants[asked]
            runs = _starts_of_runs(tenants)
        own: list[int] = tenants[runs].tolist()
        record_slots = [self._record_slots[tenant][which] for tenant in own]
        return rows_by_layout(record_slots, np.add.reduceat(counts, runs).tolist(), self._arrived, device)


def _starts_of_runs(tenants: Array) -> Array:
    """Returns the first of each run of texts with one tenant."""
    changes = np.empty(len(tenants), dtype=bool)
    changes[:1] = True
    np.not_equal(tenants[1:], tenants[:-1], out=changes[1:])
    return changes.nonzero()[0]
