"""The default policy: what can be answered in time, is; nobody takes another's share, and nobody is passed over for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hplm.errors import InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.filling import LONGEST, Room, by_priority
from hplm.scheduling.policy import positive
from hplm.scheduling.sharing import fair_first
from hplm.scheduling.waiting import Capacity


@dataclass
class Timely:
    """Plans some batches ahead, as Moore and Hodgson do for one machine: what does not fit is dropped, the longest first.

    The next batch is what is most urgent in the plan, within the tenants' fair shares. A small part of it is for what has
    waited longest, so that nobody is passed over for more batches than that part needs for what came before.
    """

    horizon: int = 8  # batches planned
    newcomers: float = 0.5  # of every later batch, left to what is still to come
    late: float = 2.0  # so many times as long counts what can be started, but not answered, in time
    reserve: float = 0.01  # of the tokens, for what has waited longest and can be in time
    _credit: float = field(default=0.0, repr=False)  # tokens of the reserve not yet used

    def __post_init__(self) -> None:
        positive(horizon=self.horizon, late=self.late)
        if not (0 <= self.newcomers <= 1 and 0 <= self.reserve <= 1):
            raise InvalidInput("policy options newcomers and reserve are shares: from 0 to 1")

    def select(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> np.ndarray:
        due = self._due(columns, start_ns, capacity, cost)
        weight = np.where(due > 0, columns.tokens, self.late * columns.tokens)
        best_first = by_priority(columns, np.argsort(np.minimum(weight, LONGEST).astype(np.uint16), kind="stable"))
        planned = self._plan(columns.tokens[best_first], np.maximum(due[best_first], 1), capacity.tokens)
        plan = best_first[: len(planned)][planned]
        plan = by_priority(columns, plan[np.argsort(due[plan], kind="stable")])
        room = Room(columns, capacity)
        self._credit = min(self._credit + self.reserve * capacity.tokens, max(capacity.tokens, columns.tokens.max()))
        room.prefix(np.flatnonzero(due), int(self._credit))
        self._credit -= capacity.tokens - room.tokens

        behind = np.ones(len(columns), bool)
        behind[plan] = behind[room.taken] = False
        if len(room.taken):
            plan = plan[~np.isin(plan, room.taken)]
        ordered = np.concatenate([plan, best_first[behind[best_first]]])
        if columns.tenants > 1:
            ordered = fair_first(columns, ordered, room.tokens)
        room.greedily(ordered)
        return room.taken

    def _due(self, columns: Columns, start_ns: int, capacity: Capacity, cost: Cost) -> np.ndarray:
        """Of each text, the last batch that answers it in time: 1 is the next, 0 none, the horizon that or any later."""
        tokens = int(columns.tokens.sum())
        share = min(1.0, capacity.tokens / tokens, capacity.texts / len(columns))
        batch_ns = max(1.0, float(cost.predict(tokens * share, len(columns) * share)))
        return np.clip((columns.deadline - start_ns) * (1 / batch_ns), 0, self.horizon).astype(np.uint8)

    def _plan(self, tokens: np.ndarray, due: np.ndarray, room: int) -> np.ndarray:
        """Which of the texts, best first, get into a batch that is in time, all of them together."""
        batches = np.arange(1, self.horizon + 1)
        due_by = np.cumsum(np.bincount(due, tokens, minlength=self.horizon + 1))[1:]
        if (due_by <= room * batches)[:-1].all():
            return np.ones(len(tokens), bool)  # nobody need be dropped, as where admission has seen to it
        limits = room * (1 + (batches - 1) * (1 - self.newcomers))
        # What comes after more than fits is looked at by nobody: it could be in the plan only because most of that is not.
        count = min(len(tokens), int(np.searchsorted(np.cumsum(tokens), limits[-1])) + 1)
        tokens, due = tokens[:count], due[:count]
        planned, left = np.zeros(count, bool), np.arange(count)
        for batch, limit in zip(batches, limits, strict=True):
            until = due <= batch
            sums = np.cumsum(tokens * until)
            if len(sums) and sums[-1] > limit:
                kept = (sums <= limit) | ~until
                tokens, due, left = tokens[kept], due[kept], left[kept]
        planned[left] = True
        return planned
