"""Refuses at once a request that cannot be answered in time, and says how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import FIRST, CostModel
from hplm.scheduling.sharing import beyond_share, fair_share
from hplm.scheduling.waiting import Waiting

BATCHES = 64  # how many batches the count looks ahead
BY_THEN = np.arange(BATCHES + 1)
LEARNING = 0.1  # rate of the running mean of what a full batch holds
STALE_NS = 10**9  # after so long without a batch, predictions are not used: only another batch can correct a wrong one
CAUTION = 2.0  # a batch may take so many mean deviations longer than predicted
MISSED = 0.03  # late share of the admitted texts: above it less is promised, below it more
CORRECTION = 0.1  # how strongly a deviation from MISSED changes the promise
FIRST_PROMISED, LEAST_PROMISED = 0.9, 0.5  # shares of a full batch: single batches take longer than the mean
REFUSED = "it would take"  # begins the error of a request that is refused on arrival; benchmarks count it


class Admission:
    """Counts the tokens that are due with each of the coming batches, and promises no more than the batches hold.

    All admitted texts are answered in time if the most urgent go first, as they do in the default policy. The count
    does not see every effect, so it is corrected by results: if too many admitted texts are late, less is promised.

    Batches are counted as if all were of one backbone. The tokens of others count by the time that they take. As long as little
    is known of a backbone, its tokens count like those of this one.
    """

    def __init__(self, costs: Sequence[CostModel]) -> None:
        self._costs = costs  # by backbone
        self._weights = np.ones(len(costs))  # of a token of each backbone
        self._backbone = 0  # the one whose batches are counted
        self._full: Array | None = None  # mean tokens, texts, adapters of batches that left other texts waiting
        self._promised = FIRST_PROMISED  # share of a full batch
        self._start_ns = 0
        self._first_ns = 0  # a batch time before the next batch is done: its start, if the engine has one stage
        self._batch_ns = 1.0  # from the end of one batch to the end of the next
        self._waiting = 0.0  # tokens, as they count
        self._free = np.zeros(BATCHES + 1)  # tokens that are promised by the end of each batch, less those due by then
        self._ran_ns = 0

    def chosen(self, backbone: int, tokens: int, texts: int, adapters: float, is_full: bool) -> None:
        """Records what a chosen batch holds."""
        if is_full:
            self._backbone = backbone
            held = np.array([tokens, texts, adapters], float)
            self._full = held if self._full is None else self._full + LEARNING * (held - self._full)

    def ran(self, now_ns: int) -> None:
        """Records when a batch was finished."""
        self._ran_ns = now_ns

    def is_believed(self, busy: bool, now_ns: int) -> bool:
        """Whether predictions are used: to refuse requests, and to drop waiting texts."""
        return any(map(self._knows, range(len(self._costs)))) and (busy or now_ns - self._ran_ns < STALE_NS)

    def done(self, on_time: int, late: int) -> None:
        """Records how many admitted texts were in time and how many late, and corrects the promise."""
        if on_time + late:
            missed = late / (on_time + late)
            self._promised = min(1.0, max(LEAST_PROMISED, self._promised + CORRECTION * (MISSED - missed)))

    def count(self, columns: Columns, start_ns: int, busy: bool) -> None:
        """Counts again, because a batch has left or another time is expected. The next batch starts at `start_ns`.

        `busy`: a batch is running, and may take longer than predicted. On an idle engine nothing delays the next one.
        """
        if not self._knows(self._backbone):
            self._backbone = next(filter(self._knows, range(len(self._costs))), self._backbone)
        cost = self._costs[self._backbone]
        self._start_ns = start_ns + (int(CAUTION * cost.deviation * self._batch_ns) if busy else 0)
        self._first_ns = self._start_ns
        if self._full is None:
            self._waiting = float(columns.demand.sum())
            return
        full: list[float] = self._full.tolist()
        whole_ns = float(cost.predict(*full))
        self._batch_ns = max(1.0, whole_ns * cost.slowest)
        if len(self._costs) > 1:
            used = map(self._cost_of, range(len(self._costs)))
            by_batch = [float(other.predict(*full)) * other.slowest for other in used]
            self._weights = np.array(by_batch) / self._batch_ns
        self._waiting = float(self._demand(columns).sum())
        beside_ns = int(whole_ns * (1 - cost.slowest))  # of a batch, in other stages than the slowest
        self._first_ns += beside_ns
        self._free = self._promised * full[0] * BY_THEN
        if not len(columns):
            return
        due = np.clip((columns.deadline - start_ns - beside_ns) * (1 / self._batch_ns), 0, BATCHES).astype(np.int64)
        self._free -= np.cumsum(np.bincount(due, self._counted(columns), minlength=BATCHES + 1))

    def check(self, texts: Sequence[Waiting], columns: Columns, busy: bool, now_ns: int) -> None:
        """Raises if this request and all promised texts cannot be answered in time. Otherwise counts it."""
        deadline = min((text.deadline_ns for text in texts if text.deadline_ns), default=0)
        backbone = texts[0].backbone
        tokens = sum(text.tokens for text in texts) * float(self._weights[backbone])
        if deadline and self._knows(backbone) and self.is_believed(busy or len(columns) > 0, now_ns):
            done_ns = self._done_at(texts, tokens, deadline, columns, now_ns)
            if done_ns > deadline:
                raise DeadlineMissed(
                    f"{REFUSED} {(done_ns - texts[0].arrival_ns) / 1e6:.0f} ms, but the request allowed "
                    f"{(deadline - texts[0].arrival_ns) / 1e6:g} ms: allow more time, send fewer texts, or ask another replica"
                )
        self._waiting += tokens
        if deadline:
            self._free[self._due_of(deadline) :] -= tokens

    def _knows(self, backbone: int) -> bool:
        return self._costs[backbone].observed >= FIRST

    def _cost_of(self, backbone: int) -> CostModel:
        """Returns the cost model by which a backbone's texts are counted."""
        return self._costs[backbone if self._knows(backbone) else self._backbone]

    def _due_of(self, deadline: int) -> int:
        return int(min(max((deadline - self._first_ns) / self._batch_ns, 0), BATCHES))

    def _counted(self, columns: Columns) -> Array:
        """Returns the tokens of each text, as they count."""
        return columns.tokens if len(self._costs) == 1 else columns.tokens * self._weights[columns.backbone]

    def _demand(self, columns: Columns) -> Array:
        """Returns the tokens of each tenant, as they count."""
        return columns.demand if len(self._costs) == 1 else columns.demand * self._weights[columns.backbones]

    def _at_once_ns(self, texts: Sequence[Waiting], columns: Columns) -> float:
        """Returns the time of all that waits, with these texts, in one batch of each backbone."""
        count = len(self._costs)
        if count == 1:
            return float(self._costs[0].predict(self._waiting + sum(text.tokens for text in texts), len(columns) + len(texts)))
        tokens = np.bincount(columns.backbones, columns.demand, count)
        waiting = np.bincount(columns.backbones, columns.counts, count)
        tokens[texts[0].backbone] += sum(text.tokens for text in texts)
        waiting[texts[0].backbone] += len(texts)
        waits = [backbone for backbone in range(count) if waiting[backbone]]
        return sum(self._cost_of(backbone).predict(float(tokens[backbone]), float(waiting[backbone])) for backbone in waits)

    def _done_at(self, texts: Sequence[Waiting], tokens: float, deadline: int, columns: Columns, now_ns: int) -> float:
        start, text = max(self._start_ns, now_ns), texts[0]
        room = np.inf if self._full is None else self._promised * self._full[0]
        if self._waiting + tokens <= room:
            return start + self._at_once_ns(texts, columns)
        due = self._due_of(deadline)
        if due and tokens <= self._free[due:].min():
            return deadline
        promised = self._promised_before(text, tokens, due, room, columns)
        if due and (promised + tokens <= room * np.arange(due, BATCHES + 1)).all():
            return deadline
        needed = ceil((promised[0] + tokens) / room)
        # The request is refused: earlier deadlines go first, and texts with later deadlines have a promise too.
        return max(self._first_ns, now_ns) + max(needed, due + 1) * self._batch_ns

    def _promised_before(self, text: Waiting, tokens: float, due: int, room: float, columns: Columns) -> Array:
        """Returns for the batch `due` and each later one the tokens due by then that this request may not displace.

        A request may displace lower priorities and longer texts. While its tenant is within its fair share, it may also
        displace what other tenants have beyond theirs.
        """
        counted, longest = self._counted(columns), text.tokens * float(self._weights[text.backbone])
        first = np.flatnonzero((columns.priority >= text.priority) & (counted <= longest))
        counted, tenant = counted[first], columns.tenant[first]
        batch = np.clip((columns.deadline[first] - self._first_ns) * (1 / self._batch_ns), due, BATCHES).astype(np.int64) - due
        promised = np.bincount(batch, counted, minlength=BATCHES + 1 - due).cumsum()
        mine = columns.number_of(text.tenant)
        demand = np.append(self._demand(columns), 0.0)
        demand[-1 if mine is None else mine] += tokens
        fair = fair_share(demand, room)
        own = 0 if mine is None else counted[(tenant == mine) & (batch == 0)].sum()
        if np.isfinite(fair) and (not own or own + tokens <= fair * due):  # a tenant's first text is always within its share
            allowed = np.maximum(fair * np.arange(due, BATCHES + 1), tokens)  # also the first texts of other tenants
            promised = promised - beyond_share(tenant, batch, counted, allowed)
        return promised
