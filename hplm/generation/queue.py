"""Sequences that wait to start. The policies of `hplm.scheduling` choose who is next. One lock is around it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from math import inf

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed, Draining
from hplm.generation.forecast import Ahead, Learned, Load, forecast
from hplm.generation.request import Sequence
from hplm.generation.running import Running
from hplm.scheduling.columns import NEVER, Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.limits import Limits, Shares
from hplm.scheduling.orders import FirstComeFirstServed
from hplm.scheduling.policy import Policy
from hplm.scheduling.selection import Selection
from hplm.scheduling.waiting import Capacity

log = logging.getLogger(__name__)


class Line:
    """Any thread offers; the loop takes."""

    def __init__(self, policy: Policy, limits: Limits, size_for: Callable[[int], int], admission: bool = False) -> None:
        """`size_for`: returns the places of the cache that so many tokens of a sequence need."""
        self.learned = Learned()
        self._policy = policy
        self._size_for = size_for
        self._admission = admission
        self._columns: Columns[Sequence] = Columns(shares=Shares(limits))
        self._waiting: dict[Sequence, Ahead] = {}  # what each brings
        self._ahead = Ahead()  # what all of them bring
        self._displaced: list[Sequence] = []
        self._load = Load()
        self._changed = threading.Condition()
        self.closed = self._woken = self._cancelling = False

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def tenants(self) -> set[str]:
        """The tenants of the sequences that wait."""
        with self._changed:
            return {sequence.request.source.tenant for sequence in self._waiting}

    def offer(self, sequence: Sequence, now_ns: int) -> None:
        """Adds a sequence, or raises. Then others may have lost their places: `displaced` has them."""
        with self._changed:
            if self.closed:
                raise Draining("the server is shutting down: send the request to another replica, or retry later")
            leaving = self._columns.shares.room_for([sequence], self._columns.newest)
            if self._admission and self._load.believed:
                self._check(sequence, now_ns)
            self._displaced += self._remove(np.array([index for own in leaving for index in own], dtype=np.int64))
            choices, own = sequence.request.sampling.n, sequence.in_the_end(self.learned.share)
            sequence.tokens = choices * own
            self._waiting[sequence] = Ahead(choices, len(sequence.ids), choices * self._size_for(own))
            self._ahead = self._ahead.plus(self._waiting[sequence])
            self._columns.add([sequence])
            self._cancelling |= sequence.request.cancelled  # since it was read
            self._wake()

    def start(self, running: Running, start_ns: int, cost: Cost, take: Callable[[Sequence], bool]) -> list[Sequence]:
        """Returns the sequences that start now, until `take` refuses one.

        The tenants come first that have the least of what runs. Among their sequences the policy chooses.
        """
        started: list[Sequence] = []
        share, goes_on = self.learned.share, True
        with self._changed:
            while goes_on and (capacity := running.capacity(share)).texts > 0 and capacity.tokens > 0:
                levels = running.levels(share)
                further = min(running.further, key=lambda one: levels[one.tenant], default=None)
                level, indexes = self._least(levels)
                if further is not None and levels[further.tenant] <= level:
                    goes_on = running.start_from(running.further, further, take)
                    started += [further] if goes_on else []
                    continue
                if not len(indexes) or (level and running.uncomputed >= running.step_tokens):
                    break
                taken: list[int] = []
                for index in self._chosen(indexes, capacity, start_ns, cost, idle=not running.sequences):
                    sequence = self._columns.text(index)
                    if running.levels(share)[sequence.tenant] > level:
                        continue  # another one of its tenant has started
                    if not (goes_on := take(sequence)):
                        break
                    taken.append(index)
                goes_on &= bool(taken)
                started += self._remove(np.array(taken, dtype=np.int64))
        return started

    def _least(self, levels: Mapping[int, int]) -> tuple[float, Array]:
        """Returns the lowest level of all tenants with sequences in the line, and the indexes of their sequences."""
        of_tenant = np.zeros(self._columns.tenants, dtype=np.int64)
        for tenant, level in levels.items():
            if (number := self._columns.number_of(tenant)) is not None:
                of_tenant[number] = level
        found = of_tenant[self._columns.tenant]
        level = found.min() if len(found) else inf
        return level, np.flatnonzero(found == level)

    def expired(self, now_ns: int) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        with self._changed:
            return self._remove(np.flatnonzero(self._columns.deadline <= now_ns))

    def displaced(self) -> list[Sequence]:
        """Returns the sequences that lost their places since the last call."""
        with self._changed:
            displaced, self._displaced = self._displaced, []
            return displaced

    def cancelled(self) -> list[Sequence]:
        """Removes and returns the sequences whose requests were cancelled. Looks at them only after `wake`: many may wait."""
        with self._changed:
            if not self._cancelling:
                return []
            self._cancelling = False
            return self._leave(lambda sequence: sequence.request.cancelled)

    def abandon(self) -> list[Sequence]:
        return self._leave(lambda sequence: True)

    def publish(self, load: Load) -> None:
        """Takes the loop's load, by which requests are admitted."""
        with self._changed:
            self._load = load

    def close(self) -> None:
        """Refuses new sequences. Those that wait still start."""
        with self._changed:
            self.closed = True
            self._wake()

    def wake(self) -> None:
        """Makes `wait` return, and `cancelled` look. For callers that have cancelled a request."""
        with self._changed:
            self._cancelling = True
            self._wake()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until something was offered, or somebody called `wake` or `close`, since the last call."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken, seconds)
            self._woken = False

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _leave(self, leaves: Callable[[Sequence], bool]) -> list[Sequence]:
        with self._changed:
            indexes = [index for index in range(len(self._columns)) if leaves(self._columns.text(index))]
            return self._remove(np.array(indexes, dtype=np.int64))

    def _remove(self, indexes: Array) -> list[Sequence]:
        removed = self._columns.remove(indexes)
        for sequence in removed:
            self._ahead = self._ahead.plus(self._waiting.pop(sequence), -1)
        return removed

    def _chosen(self, indexes: Array, capacity: Capacity, start_ns: int, cost: Cost, idle: bool) -> list[int]:
        """Lets the policy choose among sequences. `idle`: it must choose one if one has no deadline."""
        columns = self._columns if len(indexes) == len(self._columns) else self._columns.only(indexes)
        try:
            selection = Selection.of(self._policy.select(columns, start_ns, capacity, cost))
            selection.check(len(columns), idle and bool((columns.deadline == NEVER).any()))
            chosen = selection.indexes
        except Exception:  # a policy may be anybody's code; sequences must be answered even if it fails
            log.exception("the policy failed: sequences start in order of arrival")
            chosen = FirstComeFirstServed().select(columns, start_ns, capacity, cost)
        return indexes[chosen].tolist()

    def _check(self, sequence: Sequence, now_ns: int) -> None:
        """Raises if the sequence cannot keep its promise. Otherwise sets the deadline by which it must start."""
        request, load, learned = sequence.request, self._load, self.learned
        places = self._size_for(sequence.in_the_end(learned.share))
        first_token_ns, token_ns = forecast(load, self._ahead_of(sequence.tenant), len(sequence.ids), places)
        sequence.checked_ns, sequence.predicted_ns = now_ns, first_token_ns
        first_ns = now_ns - request.arrival_ns + learned.factor * first_token_ns
        rest_ns = sequence.expected(learned.share) * learned.slower * token_ns
        promise = request.promise
        for what, needed, allowed in (
            ("the first token", first_ns, promise.first_token_ns),
            ("a token", self._fair_token_ns(sequence.tenant), promise.token_ns),
            ("the answer", first_ns + rest_ns, promise.whole_ns),
        ):
            if allowed and needed > allowed:
                raise DeadlineMissed(
                    f"{what} would take {needed / 1e6:.0f} ms, but the request allowed {allowed / 1e6:g} ms: allow more time, "
                    "ask for fewer tokens, or ask another replica"
                )
        if request.deadline_ns:
            by = request.deadline_ns - int(rest_ns)
            sequence.deadline_ns = min(by, request.first_token_by_ns) if request.first_token_by_ns else by

    def _ahead_of(self, tenant: int) -> Ahead:
        """Returns what is expected to start before a new sequence: no other tenant's come more often than its own."""
        counts, number = self._counts(), self._columns.number_of(tenant)
        before = int(np.minimum(counts, 1 + (0 if number is None else counts[number])).sum())
        return self._load.further.plus(self._ahead, before / max(1, len(self._columns)))

    def _counts(self) -> Array:
        """Returns how many sequences of each tenant wait, by its number."""
        return np.bincount(self._columns.tenant, minlength=self._columns.tenants)

    def _fair_token_ns(self, own: int) -> float:
        """Returns the time between two tokens of a tenant while each other one has its fair share of sequences and steps."""
        load, columns = self._load, self._columns
        together = min(load.seats, len(load.ends) + len(columns) + 1)
        waiting = np.count_nonzero(self._counts()) - (columns.number_of(own) is not None)
        running = {tenant for tenant in load.tenants if tenant != own and columns.number_of(tenant) is None}
        reading = waiting + sum(load.tenants[tenant] for tenant in running)
        return load.fair_ns(together, 1 + waiting + len(running), reading)
