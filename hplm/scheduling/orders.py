"""The simple policies: each sorts the texts and fills a batch from the front. Higher priority always goes first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import Room, by_priority, first_come, shortest_first
from hplm.scheduling.policy import positive, whole
from hplm.scheduling.waiting import Capacity


class FirstComeFirstServed:
    """Takes texts in order of arrival. It stops at the first text that does not fit, so no text overtakes another."""

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        room = Room(columns, capacity)
        room.prefix(first_come(columns))
        return room.taken


@dataclass
class ShortestJobFirst:
    in_time: int = 0  # 1: texts that cannot be answered in time go last

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        ordered = shortest_first(columns)
        if self.in_time:
            tokens = min(capacity.tokens, int(columns.tokens.sum()))
            late = columns.deadline < start_ns + float(cost.predict(tokens, len(columns) * tokens / columns.tokens.sum()))
            ordered = ordered[np.argsort(late[ordered], kind="stable")]
        room = Room(columns, capacity)
        room.greedily(by_priority(columns, ordered))
        return room.taken


class EarliestDeadlineFirst:
    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        room = Room(columns, capacity)
        room.greedily(by_priority(columns, np.argsort(columns.deadline, kind="stable")))
        return room.taken


@dataclass
class LengthAware:
    """Student Parallelism's buffer (section 3.4, B.4.2): a batch holds texts of one length bin, that of the oldest text.

    The paper keeps an element of its buffer for each bin, and sorts newcomers into it. Here the oldest text is found, and
    one comparison finds the texts of its bin. The batches are the same, without a second list of waiting texts.
    """

    bin: int = 8  # tokens
    texts: int = 0  # of an element; 0: as many as a batch may have

    def __post_init__(self) -> None:
        positive(bin=self.bin)
        whole(bin=self.bin, texts=self.texts)

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        head = int(first_come(columns)[0])
        bins = (columns.tokens - 1) // self.bin
        element = np.flatnonzero((bins == bins[head]) & (columns.priority == columns.priority[head]))
        room = Room(columns, capacity)
        room.prefix(element[: self.texts or len(element)])
        return room.taken
