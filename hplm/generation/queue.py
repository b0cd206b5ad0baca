"""The queue of sequences that wait to start, and the choice of those that start next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from math import inf

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed
from hplm.generation.forecast import Ahead, Load, forecast
from hplm.generation.request import Sequence
from hplm.generation.running import Running
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import Policy
from hplm.scheduling.queue import Queue, Queues


class SequenceQueue(Queues[Sequence]):
    """Each text is a sequence of its own. Who calls it holds the lock of the loop."""

    def __init__(self, policy: Policy, limits: Limits, running: Running, admission: bool) -> None:
        super().__init__((policy,), limits)
        self.running = running
        self.load: Load | None = None  # of the sequences that run; None: it has changed
        (self._queue,) = self._queues
        self.cost = self._queue.cost
        self._admission = admission
        self._waiting: dict[Sequence, Ahead] = {}  # what each brings
        self._ahead = Ahead()  # what all of them bring

    @property
    def tenants(self) -> set[str]:
        """The tenants of the sequences that wait. Any thread may ask."""
        return {sequence.request.source.tenant for sequence in list(self._waiting)}

    def start(self, start_ns: int, take: Callable[[Sequence], bool]) -> list[Sequence]:
        """Returns the sequences that start now, until `take` refuses one.

        The tenants come first that have the least of what runs. Among their sequences the policy chooses.
        """
        started: list[Sequence] = []
        running, goes_on = self.running, True
        columns = self._queue.columns
        if not len(columns) and not running.further:
            return started
        while goes_on and (capacity := running.capacity).texts > 0 and capacity.tokens > 0:
            levels = running.levels()
            further = min(running.further, key=lambda one: levels[one.tenant], default=None)
            level, indexes = self._least(levels)
            if further is not None and levels[further.tenant] <= level:
                goes_on = running.start_from(running.further, further, take)
                started += [further] if goes_on else []
                continue
            if not len(indexes) or (level and running.uncomputed >= running.step_tokens):
                break
            taken: list[int] = []
            for index in self._queue.select(start_ns, capacity, not running.sequences, indexes).indexes.tolist():
                sequence = columns.text(index)
                if running.levels()[sequence.tenant] > level:
                    continue  # another one of its tenant has started
                if not (goes_on := take(sequence)):
                    break
                taken.append(index)
            goes_on &= bool(taken)
            started += self._remove(self._queue, np.array(taken, dtype=np.int64))
        return started

    def expired(self, now_ns: int) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        return [sequence for _, late in self._late(now_ns, predicts=False) for sequence in late]

    def cancelled(self) -> list[Sequence]:
        """Removes and returns the sequences whose requests were cancelled."""
        columns = self._queue.columns
        indexes = [index for index in range(len(columns)) if columns.text(index).request.cancelled]
        return self._remove(self._queue, np.array(indexes, dtype=np.int64))

    def next_expiry(self) -> int:
        """Returns when the next sequence expires, or NEVER."""
        return self._queue.earliest(predicts=False)

    def _least(self, levels: Mapping[int, int]) -> tuple[float, Array]:
        """Returns the lowest level of all tenants with waiting sequences, and the indexes of their sequences."""
        columns = self._queue.columns
        of_tenant = np.zeros(columns.tenants, dtype=np.int64)
        for tenant, level in levels.items():
            if (number := columns.number_of(tenant)) is not None:
                of_tenant[number] = level
        found = of_tenant[columns.tenant]
        level = found.min() if len(found) else inf
        return level, np.flatnonzero(found == level)

    def _remove(self, queue: Queue[Sequence], indexes: Array) -> list[Sequence]:
        removed = super()._remove(queue, indexes)
        for sequence in removed:
            self._ahead = self._ahead.plus(self._waiting.pop(sequence), -1)
        return removed

    def _admit(self, texts: Many[Sequence], now_ns: int) -> None:
        (sequence,) = texts
        if self._admission and self._queue.known:
            self.load = self.load or Load(self.running, self.cost)
            self._check(sequence, self.load, now_ns)
        choices, own = sequence.request.sampling.n, sequence.in_the_end(self.running.learned.share)
        sequence.tokens = choices * own
        self._waiting[sequence] = Ahead(choices, len(sequence.ids), choices * self.running.cache.size_for(own))
        self._ahead = self._ahead.plus(self._waiting[sequence])

    def _check(self, sequence: Sequence, load: Load, now_ns: int) -> None:
        """Raises if the sequence cannot keep its promise. Otherwise sets the deadline by which it must start."""
        request, learned = sequence.request, self.running.learned
        places = self.running.places(sequence)
        first_token_ns, token_ns = forecast(load, self._ahead_of(load, sequence.tenant), len(sequence.ids), places)
        sequence.checked_ns, sequence.predicted_ns = now_ns, first_token_ns
        first_ns = now_ns - request.arrival_ns + learned.factor * first_token_ns
        rest_ns = sequence.expected(learned.share) * learned.slower * token_ns
        promise = request.promise
        for what, needed, allowed in (
            ("the first token", first_ns, promise.first_token_ns),
            ("a token", self._fair_token_ns(load, sequence.tenant), promise.token_ns),
            ("the answer", first_ns + rest_ns, promise.whole_ns),
        ):
            if allowed and needed > allowed:
                raise DeadlineMissed(
                    f"{what} would take {needed / 1e6:.0f} ms, but the request allowed {allowed / 1e6:g} ms: allow more time, "
                    "ask for fewer tokens, or ask another replica"
                )
        if request.end_by_ns:
            by = request.end_by_ns - int(rest_ns)
            sequence.deadline_ns = min(by, request.first_token_by_ns) if request.first_token_by_ns else by

    def _ahead_of(self, load: Load, tenant: int) -> Ahead:
        """Returns what is expected to start before a new sequence: no other tenant's come more often than its own."""
        counts, number = self._counts(), self._queue.columns.number_of(tenant)
        before = int(np.minimum(counts, 1 + (0 if number is None else counts[number])).sum())
        return load.further.plus(self._ahead, before / max(1, len(self._queue.columns)))

    def _counts(self) -> Array:
        """Returns how many sequences of each tenant wait, by its number."""
        return np.bincount(self._queue.columns.tenant, minlength=self._queue.columns.tenants)

    def _fair_token_ns(self, load: Load, own: int) -> float:
        """Returns the time between two tokens of a tenant while each other one has its fair share of sequences and steps."""
        columns = self._queue.columns
        together = min(load.running.seats, len(load.ends) + len(columns) + 1)
        waiting = np.count_nonzero(self._counts()) - (columns.number_of(own) is not None)
        running = {tenant for tenant in load.tenants if tenant != own and columns.number_of(tenant) is None}
        reading = waiting + sum(load.tenants[tenant] for tenant in running)
        return load.fair_ns(together, 1 + waiting + len(running), reading)
