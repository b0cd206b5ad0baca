"""The scheduler for threads: one lock around it, and calls that wait for a batch or for expired texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic

from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import NEVER
from hplm.scheduling.cost import TERMS
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import Capacity, T


@dataclass(frozen=True)
class Levels:
    """The waiting texts of one backbone, the governor's rung, and the backbone's cost model, at one moment."""

    texts: int
    bytes: int
    rung: int  # of tenants beyond their fair share
    cost: dict[str, float]  # nanoseconds by term of the cost model


class Queue(Generic[T]):
    def __init__(self, scheduler: Scheduler[T], now_ns: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._now_ns = now_ns
        lock = threading.RLock()
        self._to_do = threading.Condition(lock)  # wakes `take`
        self._expiring = threading.Condition(lock)  # wakes `expired`
        self._wake_ns = NEVER  # when `expired` wakes by itself

    def __len__(self) -> int:
        return len(self._scheduler)

    def levels(self, backbone: int = 0) -> Levels:
        with self._to_do:
            cost = dict(zip(TERMS, self._scheduler.costs[backbone].terms.tolist(), strict=True))
            return Levels(*self._scheduler.waiting(backbone), self._scheduler.governor.rung, cost)

    def rung(self, tenant: Hashable, tokens: int, costs: Sequence[float]) -> int:
        """Counts a request as load, and returns its rung: 0 is the dearest.

        Call it once for each request that arrives, before it is offered: also if its tenant has a single rung, or if it names
        its rung itself. `costs`: of each rung, the dearest first: how many passes through all layers a token is expected
        to take.
        """
        with self._to_do:
            return self._scheduler.rung(tenant, tokens, costs, self._now_ns())

    def offer(self, texts: Sequence[T]) -> list[T]:
        """Adds all texts of one request, or raises and adds none.

        Returns texts of other tenants that lost their places to them, all of a request: the caller answers these.
        """
        with self._to_do:
            displaced = self._scheduler.offer(texts, self._now_ns())
            self._to_do.notify()
            self._look_at_expiry()
            return displaced

    def take(self, capacity: Capacity) -> Batch[T] | None:
        """Waits for a batch and returns it. Returns None once the queue is closed and empty."""
        with self._to_do:
            while True:
                now = self._now_ns()
                wait_ns = self._scheduler.choose_at(now) - now
                batch = self._scheduler.choose(capacity, now) if wait_ns <= 0 else None
                if batch:
                    self._look_at_expiry()
                    return batch
                if self._scheduler.draining and not len(self._scheduler):
                    return None
                self._to_do.wait(wait_ns / 1e9 if wait_ns > 0 else None)

    def expired(self) -> list[T] | None:
        """Waits for texts that can no longer be answered in time, removes and returns them.

        Returns None once the queue is closed and empty.
        """
        with self._expiring:
            while True:
                now = self._now_ns()
                late = self._scheduler.expired(now)
                if late:
                    self._to_do.notify()
                    return late
                if self._scheduler.draining and not len(self._scheduler):
                    return None
                self._wake_ns = self._scheduler.next_expiry(now)
                self._expiring.wait(None if self._wake_ns == NEVER else max(0, self._wake_ns - now) / 1e9)

    def separate(self, tenants: frozenset[int]) -> None:
        """Sets the tenants that run alone (`Scheduler.alone`)."""
        with self._to_do:
            self._scheduler.alone = tenants
            self._to_do.notify()

    def started(self, batch: Batch[T]) -> None:
        with self._to_do:
            self._scheduler.started(batch, self._now_ns())
            self._look_at_expiry()

    def released(self, batch: Batch[T]) -> None:
        """Records that a batch has left the first of several stages."""
        with self._to_do:
            self._scheduler.released(batch, self._now_ns())
            self._to_do.notify()
            self._look_at_expiry()

    def left(self, batch: Batch[T], texts: Sequence[T]) -> None:
        """Records that these texts of a running batch are answered already."""
        with self._to_do:
            self._scheduler.left(batch, texts, self._now_ns())

    def finished(self, batch: Batch[T], adapters: int = 0, stages_ns: Sequence[int] = ()) -> None:
        with self._to_do:
            self._scheduler.finished(batch, self._now_ns(), adapters, stages_ns)
            self._to_do.notify()
            self._look_at_expiry()

    def halve(self, batch: Batch[T], left: Sequence[T]) -> bool:
        """Replaces a batch for which the device had no memory by smaller ones, with those of its texts that are `left`.

        Returns False if that was done before, or cannot be.
        """
        with self._to_do:
            halved = self._scheduler.halve(batch, left, self._now_ns())
            self._to_do.notify()
            return halved

    def dropped(self, batch: Batch[T]) -> None:
        with self._to_do:
            self._scheduler.dropped(batch, self._now_ns())
            self._to_do.notify()
            self._look_at_expiry()

    def close(self) -> None:
        """Refuses new requests. Waiting texts are still served."""
        with self._to_do:
            self._scheduler.close()
            self._to_do.notify_all()
            self._expiring.notify_all()

    def abandon(self) -> list[T]:
        """Closes the queue and returns all texts that have no answer yet."""
        with self._to_do:
            left = self._scheduler.abandon()
            self.close()
            return left

    def _look_at_expiry(self) -> None:
        """Wakes `expired` if a text expires before it would wake by itself, or if the queue is closed."""
        if self._scheduler.next_expiry(self._now_ns()) < self._wake_ns or self._scheduler.draining:
            self._expiring.notify()
