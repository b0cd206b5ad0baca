"""Requests that are refused, but not told so at once.

Clients that do not wait before they ask again would take the time of those who have a place: a thousand refusals a second take
most of two cores. So a refusal leaves for each request that is served, and at the latest when its client may come again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

from hplm.scheduling.limits import Limits


class Request(Protocol):
    @property
    def left(self) -> int: ...  # the work that it asks for, which stands for the memory that it takes


T = TypeVar("T", bound=Request)


class Refused(Generic[T]):
    """Keeps refused requests. Threads may share it."""

    def __init__(self, limits: Limits, tell: Callable[[T], None], now_ns: Callable[[], int]) -> None:
        """`tell` answers a request. The limits say how many are kept; the others are told at once."""
        self._limits = limits
        self._tell = tell
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._kept: list[tuple[int, int, T]] = []  # heap of (when it is told at the latest, order of arrival, request)
        self._arrivals = 0
        self._work = 0

    def keep(self, request: T, until_ns: int) -> None:
        with self._lock:
            self._arrivals += 1
            self._work += request.left
            heappush(self._kept, (until_ns, self._arrivals, request))
            told: list[T] = []
            while len(self._kept) > self._limits.items or self._work > self._limits.work:
                told.append(self._take())
        self._tell_all(told)

    def send_due(self, served: int) -> None:
        """Refuses those whose time has come, and one for each request that was served."""
        with self._lock:
            now, told = self._now_ns(), list[T]()
            while self._kept and (self._kept[0][0] <= now or len(told) < served):
                told.append(self._take())
        self._tell_all(told)

    def send_all(self) -> None:
        """Refuses all that it keeps."""
        self.send_due(self._limits.items)

    def _take(self) -> T:
        request = heappop(self._kept)[2]
        self._work -= request.left
        return request

    def _tell_all(self, told: list[T]) -> None:
        for request in told:
            self._tell(request)
