"""Staged batches: all that the engine needs of them, and which of their texts are still there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor

from hplm.adapters.layout_rows import LayoutRows
from hplm.adapters.slots import CopyEvent, Slots
from hplm.arrays import Array, joined
from hplm.engine.laid import Laid, StagingSettings
from hplm.engine.packing import Arrangement
from hplm.engine.request import Text
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.cpu import Computing
from hplm.model.layer import Attend
from hplm.model.tensors import Block, sent
from hplm.plot.forest import Forest
from hplm.scheduling.selection import Batch

NOBODY = np.empty(0, dtype=np.int64)
ROOM, TOKEN_ROOM = 1 << 14, 64  # bytes for what a sheet sends, and for each of its tokens


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
        lie: Callable[[Arrangement, Sequence[Text]], Laid],
    ) -> None:
        """`texts`: of the whole batch. `lie` lays its own, in their order in the tensor."""
        self.indexes: list[int] = arrangement.texts.tolist()  # of its texts in the batch
        self.texts = [texts[index] for index in self.indexes]
        self.addresses = joined([text.addresses for text in self.texts])
        self.lengths = arrangement.lengths  # of all its texts, also of those that have left
        self.rows = arrangement.rows  # of its tensors, padding included
        tokens = arrangement.tokens if arrangement.is_scattered else None
        places = joined([text.segments for text in self.texts]).astype(np.int64)
        if config.has_places:
            places = arrangement.offsets + places * config.positions
        first = settings.devices[0]
        # If some may leave, each text has a row: the exit where it may, and how many layers it passes (0: all).
        self.may_leave = any([text.plan is not None or text.depth for text in self.texts])
        self._ways = np.array([(text.exit, text.depth) for text in self.texts] if self.may_leave else [])
        # The device has what a block sends when the block closes.
        with Block(first, ROOM + TOKEN_ROOM * self.rows) if settings.sends_together else nullcontext() as block:
            # The row of each token in the engine's table of positions and segments.
            self.places = sent(arrangement.by_row(places), first)
            # The row of each token in the tensor; None: in order, with padding behind the last one only.
            self.scattered = None if tokens is None else sent(tokens, first)
            self.laid = lie(arrangement, self.texts)  # where those texts lie that have not left
            if not self.may_leave:  # all come to the end, which can be prepared ahead
                _, _, adapters = self.laid.ending
                if block is not None and settings.recorded:
                    self._note_shape(block, self.laid.attend[0], [*self.laid.adapters[0], *adapters])
                _ = self.laid.heads

    def _note_shape(self, block: Block, attend: Attend, parts: list[LayoutRows]) -> None:
        """Notes what decides which kernels the layers are, if it is few numbers."""
        self.numbers = block.so_far
        if (
            isinstance(attend, PackedAttention)
            and attend.few_shapes
            and not block.is_full
            and all(part.groups.is_recordable for part in parts)
        ):
            own = self.laid.adapters[0]
            addresses = [tensor.data_ptr() for part in own for layer in part.layers for tensor in layer.values()]
            layouts = [(part.layout, part.rows is None) for part in parts]
            self.shape = (self.rows, attend.longest, *block.taken, *layouts, *addresses)

    def asked(self, exit: int) -> Array:
        """Returns the numbers of the texts that may leave at an exit."""
        return np.flatnonzero(self._ways[:, 0] == exit)

    def done(self, layers: int) -> Array:
        """Returns the numbers of the texts that pass so many layers."""
        return NOBODY if not layers else np.flatnonzero(self._ways[:, 1] == layers)

    def leave(self, numbers: Array) -> Array:
        """Takes texts out. Returns the rows of the others, which lie end to end from now on, without padding."""
        stays: Array = np.ones(len(self.texts), dtype=bool)
        stays[numbers] = False
        before = self.laid.arrangement
        self.texts, self.indexes = list(compress(self.texts, stays)), list(compress(self.indexes, stays))
        self._ways = self._ways[stays]
        if self.texts:
            self.laid = self.laid.rest(stays, self.texts)
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
