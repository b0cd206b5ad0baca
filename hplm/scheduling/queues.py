"""The queues of all engines: they offer, evict, expire and abandon texts. Only the choice of the next ones differs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.errors import Draining
from hplm.scheduling.limits import Limits, Shares
from hplm.scheduling.policy import Policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.waiting import T


class Queues(Generic[T]):
    """A queue for each backbone of an engine, under one limit. It has no threads and no clock of its own."""

    def __init__(self, policies: Sequence[Policy], limits: Limits, answering_ns: int = 0) -> None:
        """`policies`: one for each backbone, because a policy may keep a state."""
        self.shares = Shares(limits)
        self._queues: list[Queue[T]] = [Queue(number, own, self.shares, answering_ns) for number, own in enumerate(policies)]
        self.draining = False

    def __len__(self) -> int:
        return self.shares.items

    def offer(self, texts: Sequence[T], now_ns: int) -> list[T]:
        """Adds all texts of one request, or raises and adds none.

        Returns texts of other tenants that lost their places to them, all of a request: the caller answers these.
        """
        if self.draining:
            raise Draining("the server is shutting down: send the request to another replica, or retry later")
        leaving = self.shares.room_for(texts, self._newest)
        self._admit(texts, now_ns)
        evicted: list[T] = []
        for own in {own for own, _ in leaving}:
            evicted += self._remove(own, np.concatenate([indexes for loses, indexes in leaving if loses is own]))
        self._queues[texts[0].backbone].add(texts)
        return evicted

    def close(self) -> None:
        """Refuses new requests. Waiting texts are still served."""
        self.draining = True

    def abandon(self) -> list[T]:
        """Removes and returns all waiting texts."""
        return [text for queue in self._queues for text in self._remove(queue, np.arange(len(queue.columns)))]

    def _admit(self, texts: Sequence[T], now_ns: int) -> None:
        """Raises if the texts of a request cannot be in time."""

    def _late(self, start_ns: int, predicts: bool) -> Iterator[tuple[Queue[T], list[T]]]:
        """Removes and yields, by their queues, the texts that had to start by this time, with the others of their requests."""
        for queue in self._queues:
            if queue.earliest(predicts) <= start_ns:
                yield queue, self._remove(queue, queue.late(start_ns, predicts))

    def _remove(self, queue: Queue[T], indexes: Array) -> list[T]:
        return queue.remove(indexes)

    def _newest(self, tenant: Hashable) -> Iterator[tuple[int, int, tuple[Queue[T], Array]]]:
        for queue in self._queues:
            for texts, size, indexes in queue.columns.newest(tenant):
                yield texts, size, (queue, indexes)
