"""Sequences that wait to start. The policies of `hplm.scheduling` choose who is next. One lock is around it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from hplm.arrays import Array
from hplm.errors import DeadlineMissed, Draining
from hplm.generation.forecast import Ahead, Learned, Load, forecast
from hplm.generation.request import Sequence
from hplm.scheduling.columns import NEVER, Columns
from hplm.scheduling.cost import Cost
from hplm.scheduling.limits import Limits
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
        self._limits = limits
        self._size_for = size_for
        self._admission = admission
        self._columns: Columns[Sequence] = Columns()
        self._waiting: dict[Sequence, int] = {}  # the places that each is expected to need
        self._places = 0  # of all of them
        self._displaced: list[Sequence] = []
        self._load = Load()
        self._changed = threading.Condition()
        self._woken = self._closed = self._cancelling = False

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def tenants(self) -> set[str]:
        """The tenants of the sequences that wait."""
        with self._changed:
            return {sequence.request.source.tenant for sequence in self._waiting}

    @property
    def closed(self) -> bool:
        return self._closed

    def offer(self, sequence: Sequence, now_ns: int) -> None:
        """Adds a sequence, or raises. Then others may have lost their places: `displaced` has them."""
        with self._changed:
            if self._closed:
                raise Draining("the server is shutting down: send the request to another replica, or retry later")
            leaving = self._limits.displaced([sequence], self._columns)
            if self._admission and self._load.believed:
                self._check(sequence, now_ns)
            self._displaced += self._remove(leaving)
            self._waiting[sequence] = self._size_for(sequence.in_the_end(self.learned.share))
            self._places += self._waiting[sequence]
            self._columns.add([sequence])
            self._wake()

    def start(
        self, capacity: Capacity, start_ns: int, cost: Cost, take: Callable[[Sequence], bool], idle: bool
    ) -> list[Sequence]:
        """Returns the sequences that start now: those that the policy chooses, until `take` refuses one.

        `idle`: nothing runs, so the policy must choose a sequence if one has no deadline.
        """
        with self._changed:
            if not len(self._columns) or capacity.texts <= 0 or capacity.tokens <= 0:
                return []
            taken: list[int] = []
            for index in self._chosen(capacity, start_ns, cost, idle).tolist():
                if not take(self._columns.text(index)):
                    break
                taken.append(index)
            return self._remove(np.array(taken, dtype=np.int64))

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
            self._closed = True
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
            self._places -= self._waiting.pop(sequence)
        return removed

    def _chosen(self, capacity: Capacity, start_ns: int, cost: Cost, idle: bool) -> Array:
        try:
            chosen = Selection.of(self._policy.select(self._columns, start_ns, capacity, cost))
            chosen.check(len(self._columns), idle and bool((self._columns.deadline == NEVER).any()))
            return chosen.indexes
        except Exception:  # a policy may be anybody's code; sequences must be answered even if it fails
            log.exception("the policy failed: sequences start in order of arrival")
            return FirstComeFirstServed().select(self._columns, start_ns, capacity, cost)

    def _check(self, sequence: Sequence, now_ns: int) -> None:
        """Raises if the sequence cannot keep its promise. Otherwise sets the deadline by which it must start."""
        request, load, learned = sequence.request, self._load, self.learned
        ahead = Ahead(len(self._columns), int(self._columns.demand.sum()), self._places)
        times = forecast(load, ahead, sequence.tokens, self._size_for(sequence.in_the_end(learned.share)))
        sequence.checked_ns, sequence.predicted_ns = now_ns, times.first_token_ns
        first_ns = now_ns - request.arrival_ns + learned.factor * times.first_token_ns
        rest_ns = sequence.expected(learned.share) * learned.slower * times.token_ns
        promise = request.promise
        for what, needed, allowed in (
            ("the first token", first_ns, promise.first_token_ns),
            ("a token", load.decoding_ns(1), promise.token_ns),
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
