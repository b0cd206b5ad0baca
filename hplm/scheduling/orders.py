"""The simple policies: each sorts the texts and fills a batch from the front. Higher priority always goes first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import Room, by_priority, first_come, shortest_first
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
