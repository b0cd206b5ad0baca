"""Refuses at once a request that cannot be answered in time, and says how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed
from hplm.scheduling.fairness import beyond_share, fair_share
from hplm.scheduling.limits import Waiting
from hplm.scheduling.queue import Queue

BATCHES = 64  # how many batches the count looks ahead
BY_THEN = np.arange(BATCHES + 1)
LEARNING = 0.1  # rate of the running mean of what a full batch holds
CAUTION = 2.0  # a batch may take so many mean deviations longer than predicted
MISSED = 0.03  # late share of the admitted texts: above it less is promised, below it more
CORRECTION = 0.2  # how strongly a deviation from MISSED changes the promise, if it is that of a full batch of texts
FIRST_PROMISED, LEAST_PROMISED = 0.9, 0.5  # shares of a full batch: single batches take longer than the mean
REFUSED = "it would take"  # begins the error of a request that is refused on arrival; benchmarks count it


class Admission:
    """Counts the tokens that are due with each of the coming batches, and promises no more than the batches hold.

    All admitted texts are answered in time if the most urgent go first, as they do in the default policy. The count
    does not see every effect, so it is corrected by results: if too many admitted texts are late, less is promised.
    """

    def __init__(self, queue: Queue[Any]) -> None:
        self._queue = queue
        self._full: list[float] | None = None  # mean tokens, texts, adapters of batches that left other texts waiting
        self._promised = FIRST_PROMISED  # share of a full batch
        self.must_count = False  # because a batch has left, or another time is expected for the next one
        self._start_ns = 0
        self._first_ns = 0  # a batch time before the next batch is done: its start, if the engine has one stage
        self._batch_ns = 1.0  # from the end of one batch to the end of the next
        self._waiting = 0  # tokens
        self._free = np.zeros(BATCHES + 1)  # tokens that are promised by the end of each batch, less those due by then

    def chosen(self, tokens: float, texts: float, adapters: float) -> None:
        """Records what a batch holds that left texts waiting."""
        held = [tokens, texts, adapters]
        self._full = [mean + LEARNING * (own - mean) for mean, own in zip(self._full or held, held, strict=True)]

    def done(self, on_time: int, late: int) -> None:
        """Records how many admitted texts were in time and how many late, and corrects the promise by each of them."""
        if self._full is not None:
            missed = late - MISSED * (on_time + late)
            self._promised = min(1.0, max(LEAST_PROMISED, self._promised - CORRECTION * missed / self._full[1]))

    def check(self, texts: Sequence[Waiting], predicts: bool, now_ns: int) -> None:
        """Raises if this request and all promised texts cannot be answered in time. Otherwise counts it."""
        deadline = min([text.deadline_ns for text in texts if text.deadline_ns], default=0)
        tokens = sum([text.tokens for text in texts])
        if deadline and predicts and self._queue.known:
            done_ns = self._done_at(texts, tokens, deadline, now_ns)
            if done_ns > deadline:
                raise DeadlineMissed(
                    f"{REFUSED} {(done_ns - texts[0].arrival_ns) / 1e6:.0f} ms, but the request allowed "
                    f"{(deadline - texts[0].arrival_ns) / 1e6:g} ms: allow more time, send fewer texts, or ask another replica"
                )
        self._waiting += tokens
        if deadline:
            self._free[self._due_of(deadline) :] -= tokens

    def count(self, start_ns: int, busy: bool) -> None:
        """Counts what waits again. `start_ns`: when the next batch is expected to start.

        `busy`: a batch is running, and may take longer than predicted. On an idle engine nothing delays the next one.
        """
        self.must_count = False
        columns, cost = self._queue.columns, self._queue.cost
        self._start_ns = self._first_ns = start_ns + (int(CAUTION * cost.deviation * self._batch_ns) if busy else 0)
        self._waiting = columns.all_tokens
        if self._full is None:
            return
        whole_ns = cost.predict(*self._full)
        self._batch_ns = max(1.0, whole_ns * cost.slowest)
        beside_ns = int(whole_ns * (1 - cost.slowest))  # of a batch, in other stages than the slowest
        self._first_ns += beside_ns
        self._free = self._promised * self._full[0] * BY_THEN
        if len(columns):
            due = np.clip((columns.deadline - start_ns - beside_ns) * (1 / self._batch_ns), 0, BATCHES).astype(np.int64)
            self._free -= np.cumsum(np.bincount(due, columns.tokens, minlength=BATCHES + 1))

    def _due_of(self, deadline: int) -> int:
        return int(min(max((deadline - self._first_ns) / self._batch_ns, 0), BATCHES))

    def _done_at(self, texts: Sequence[Waiting], tokens: int, deadline: int, now_ns: int) -> float:
        start, waiting = max(self._start_ns, now_ns), len(self._queue.columns) + len(texts)
        room = np.inf if self._full is None else self._promised * self._full[0]
        if self._waiting + tokens <= room:  # all that waits is one batch
            return start + self._queue.cost.predict(self._waiting + tokens, waiting)
        due = self._due_of(deadline)
        if due and tokens <= self._free[due:].min():
            return deadline
        promised = self._promised_before(texts[0], tokens, due, room)
        if due and (promised + tokens <= room * np.arange(due, BATCHES + 1)).all():
            return deadline
        needed = ceil((promised[0] + tokens) / room)
        # The request is refused: earlier deadlines go first, and texts with later deadlines have a promise too.
        return max(self._first_ns, now_ns) + max(needed, due + 1) * self._batch_ns

    def _promised_before(self, text: Waiting, tokens: int, due: int, room: float) -> Array:
        """Returns for the batch `due` and each later one the tokens due by then that this request may not displace.

        A request may displace its tenant's lower priorities, and longer texts. While its tenant is within its fair share, it
        may also displace what other tenants have beyond theirs.
        """
        columns = self._queue.columns
        mine = columns.number_of(text.tenant)
        is_lower = (columns.tenant == mine) & (columns.priority < text.priority)
        first = np.flatnonzero(~is_lower & (columns.tokens <= text.tokens))
        counted, tenant = columns.tokens[first], columns.tenant[first]
        batch = np.clip((columns.deadline[first] - self._first_ns) * (1 / self._batch_ns), due, BATCHES).astype(np.int64) - due
        promised = np.bincount(batch, counted, minlength=BATCHES + 1 - due).cumsum()
        demand = np.append(columns.demand, 0)
        demand[-1 if mine is None else mine] += tokens
        fair = fair_share(demand, room)
        own = 0 if mine is None else counted[(tenant == mine) & (batch == 0)].sum()
        if np.isfinite(fair) and (not own or own + tokens <= fair * due):  # a tenant's first text is always within its share
            allowed = np.maximum(fair * np.arange(due, BATCHES + 1), tokens)  # also the first texts of other tenants
            promised = promised - beyond_share(tenant, batch, counted, allowed)
        return promised
