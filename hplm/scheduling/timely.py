"""The default policy. It answers in time what it can, keeps tenants to fair shares, and starves no text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.scheduling.columns import NEVER, Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.fairness import fair_first
from hplm.scheduling.filling import LONGEST, Room, by_priority, first_come, fits, full_batch_ns
from hplm.scheduling.selection import Capacity

HORIZON = 8  # batches planned
NEWCOMERS = 0.5  # share of every later batch that is kept for texts still to come
LATE = 2.0  # a text that can be started, but not answered, in time counts as so many times as long
PLANNED = 1 + np.arange(HORIZON) * (1.0 - NEWCOMERS)  # how many batches the plan may fill until each ends


@dataclass
class Timely:
    """Plans some batches ahead, by Moore and Hodgson's rule for one machine: the longest texts leave a plan that is too full.
    Texts without a deadline enter it last, in order of arrival.

    The next batch holds the most urgent texts of the plan, within the tenants' fair shares. A small part of all tokens is
    reserved for the text that has waited longest. This limits how many batches can pass over a text.
    """

    reserve: float = 0.01  # share of the tokens for the text that has waited longest and can be in time
    _credit: float = field(default=0.0, repr=False)  # tokens of the reserve not yet used

    def __post_init__(self) -> None:
        if not 0 <= self.reserve <= 1:
            raise InvalidInput(f"policy option reserve={self.reserve} is a share: give a number from 0 to 1")

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> Array:
        if fits(columns, capacity):
            return first_come(columns)
        self._credit += self.reserve * capacity.tokens
        if self._credit > capacity.tokens:
            self._credit = min(self._credit, max(capacity.tokens, int(columns.tokens.max())))
        # The last batch that answers a text in time. 1 is the next one, 0 means none, and HORIZON that batch or any later one.
        batches = (columns.deadline - start_ns) * (1 / full_batch_ns(columns, capacity, cost))
        due = np.clip(batches, 0, HORIZON).astype(np.uint8)
        ordered = self._best_first(columns, due, capacity.tokens)
        if columns.tenants > 1:
            ordered = fair_first(columns, ordered, capacity.tokens)
        room, reserve = Room(columns, capacity), int(self._credit)
        if reserve < capacity.tokens:  # else it comes first: the next text may be too long for both, again and again
            reserve = min(reserve, capacity.tokens - int(columns.tokens[ordered[0]]))
        room.prefix(np.flatnonzero(due), reserve)
        if reserved := capacity.tokens - room.tokens:
            self._credit -= reserved
            waits = np.ones(len(columns), bool)
            waits[room.taken] = False
            ordered = ordered[waits[ordered]]
        room.greedily(ordered)
        return room.taken

    def _best_first(self, columns: Columns, due: Array, room: int) -> Array:
        """Returns all texts, those of the plan first. `room`: the tokens of a batch."""
        tokens, limits = columns.tokens, room * PLANNED
        weight = np.where(due > 0, tokens, LATE * tokens)
        weight[columns.deadline == NEVER] = LONGEST  # in order of arrival: long ones would wait while short ones come
        best_first = by_priority(columns, np.argsort(np.minimum(weight, LONGEST).astype(np.uint16), kind="stable"))
        if self._all_in_time(tokens, due, room):
            head, tail, planned = best_first, best_first[:0], due[best_first] > 0
        else:
            # Texts behind the horizon's limit could be planned only if most texts before them were not: they are skipped.
            count = int(np.searchsorted(np.cumsum(tokens[best_first]), float(limits[-1]))) + 1
            head, tail = best_first[:count], best_first[count:]
            planned = self._plan(tokens[head], np.maximum(due[head], 1), limits)
        plan = head[planned]
        plan = by_priority(columns, plan[np.argsort(due[plan], kind="stable")])
        return np.concatenate([plan, head[~planned], tail])

    @staticmethod
    def _all_in_time(tokens: Array, due: Array, room: int) -> bool:
        """Whether all texts that can be in time fit, as is usual with admission."""
        due_by = np.cumsum(np.bincount(due, tokens, minlength=HORIZON + 1)[1:])
        return bool((due_by[:-1] <= room * np.arange(1, HORIZON)).all())

    @staticmethod
    def _plan(tokens: Array, due: Array, limits: Array) -> Array:
        """Returns which texts, given best first, can all be answered in time together."""
        planned, left = np.zeros(len(tokens), bool), np.arange(len(tokens))
        for batch, limit in enumerate(limits, 1):
            until = due <= batch
            sums = np.cumsum(tokens * until)
            if len(sums) and sums[-1] > limit:
                kept = (sums <= limit) | ~until
                tokens, due, left = tokens[kept], due[kept], left[kept]
        planned[left] = True
        return planned
