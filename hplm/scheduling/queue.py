"""The line: bounded, emptied of what has expired, cut into batches by a policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hplm.errors import Draining, QueueFull
from hplm.scheduling.policy import Policy
from hplm.scheduling.waiting import Capacity, Waiting


@dataclass(frozen=True)
class Turn:
    """What came out of the line at once: a batch to run, and texts whose time has passed."""

    batch: list[Waiting]
    expired: list[Waiting]


class Queue:
    def __init__(self, limit: int, policy: Policy, now_ns: Callable[[], int]) -> None:
        self.limit = limit  # texts
        self._policy = policy
        self._now_ns = now_ns
        self._waiting: list[Waiting] = []
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, texts: Sequence[Waiting]) -> None:
        """All of them or none."""
        with self._changed:
            if self._closed:
                raise Draining("the server is shutting down: send the request to another replica, or again later")
            if len(self._waiting) + len(texts) > self.limit:
                raise QueueFull(
                    f"{len(self._waiting)} texts are waiting and {len(texts)} more do not fit the limit of {self.limit}: "
                    "retry after 0.1 s, or send fewer texts a request"
                )
            self._waiting.extend(texts)
            self._changed.notify()

    def take(self, capacity: Capacity) -> Turn | None:
        """Waits for something to do. None once the queue is closed and empty."""
        with self._changed:
            while True:
                now = self._now_ns()
                expired = [text for text in self._waiting if text.expired(now)]
                if expired:
                    self._waiting = [text for text in self._waiting if not text.expired(now)]
                batch = self._policy.select(self._waiting, now, capacity) if self._waiting else []
                if batch:
                    chosen = set(map(id, batch))
                    self._waiting = [text for text in self._waiting if id(text) not in chosen]
                if batch or expired:
                    return Turn(batch, expired)
                if self._closed:
                    return None
                self._changed.wait()

    def close(self) -> None:
        """Nothing more comes in; what waits is still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> list[Waiting]:
        """Closes the line and hands over whatever still stands in it."""
        self.close()
        with self._changed:
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
            return left
