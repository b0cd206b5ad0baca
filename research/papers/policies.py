"""Policies of papers that no server needs: TCB's Slotted-DAS, and the buffer of Student Parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.das import NONE, DeadlineAware
from hplm.scheduling.filling import Room, first_come, first_fit
from hplm.scheduling.policy import whole
from hplm.scheduling.selection import OUTSIDE, Capacity, Places, Selection


@dataclass
class SlottedDeadlineAware(DeadlineAware):
    """TCB's Algorithm 2: DAS, then slots as long as the longest text that was chosen for its utility. Longer texts wait."""

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Selection:
        filled, tokens = self.fill(columns, capacity), columns.tokens
        inside = filled.inside
        dominant = np.concatenate([NONE, *(row.dominant for row in filled.rows)])
        slot_tokens = int(tokens[dominant if len(dominant) else inside].max(initial=1))
        slots = filled.row_tokens // slot_tokens  # of a row
        slot = first_fit(tokens[inside], slot_tokens, filled.free * slots)
        fits = slot != OUTSIDE
        slot = np.concatenate([np.full(len(filled.outside), OUTSIDE), slot[fits]])
        return Selection(np.concatenate([filled.outside, inside[fits]]), Places(slot // slots, slot))


@dataclass
class LengthAware:
    """Student Parallelism's buffer (section 3.4, B.4.2): a batch holds texts of one length bin, that of the oldest text.

    The paper keeps an element of its buffer for each bin, and sorts newcomers into it. Here the oldest text is found, and
    one comparison finds the texts of its bin. The batches are the same, without a second list of waiting texts.
    """

    bin: int = 8  # tokens
    texts: int = 0  # of an element; 0: as many as a batch may have

    def __post_init__(self) -> None:
        whole(bin=self.bin, texts=self.texts)
        if not self.bin:
            raise InvalidInput("policy option bin=0 is not above 0: give a number above 0")

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        head = int(first_come(columns)[0])
        bins = (columns.tokens - 1) // self.bin
        element = np.flatnonzero((bins == bins[head]) & (columns.priority == columns.priority[head]))
        room = Room(columns, capacity)
        room.prefix(element[: self.texts or len(element)])
        return room.taken
