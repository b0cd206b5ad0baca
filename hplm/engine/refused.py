"""Requests that are refused, but not told so at once.

Clients that do not wait before they ask again would take the time of those who have a place: a thousand refusals a second take
most of two cores. So a refusal leaves for each request that is served, and at the latest when its client may come again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush

from hplm.engine.lookup import LookupRequest
from hplm.scheduling.limits import Limits


class Refused:
    """Keeps refused requests. Threads may share it."""

    def __init__(self, limits: Limits, tell: Callable[[LookupRequest], None], now_ns: Callable[[], int]) -> None:
        """`tell` answers a request. The limits say how many are kept; the others are told at once."""
        self._limits = limits
        self._tell = tell
        self._now_ns = now_ns
        self._lock = threading.Lock()
        # Heap of (when it is told at the latest, order of arrival, request).
        self._kept: list[tuple[int, int, LookupRequest]] = []
        self._arrivals = 0
        self._work = 0

    def keep(self, request: LookupRequest, until_ns: int) -> None:
        with self._lock:
            self._arrivals += 1
            self._work += request.left
            heappush(self._kept, (until_ns, self._arrivals, request))
            told: list[LookupRequest] = []
            while len(self._kept) > self._limits.items or self._work > self._limits.work:
                told.append(self._take())
        self._tell_all(told)

    def send_due(self, served: int) -> None:
        """Refuses those whose time has come, and one for each request that was served."""
        with self._lock:
            now, told = self._now_ns(), list[LookupRequest]()
            while self._kept and (self._kept[0][0] <= now or len(told) < served):
                told.append(self._take())
        self._tell_all(told)

    def send_all(self) -> None:
        """Refuses all that it keeps."""
        self.send_due(self._limits.items)

    def _take(self) -> LookupRequest:
        request = heappop(self._kept)[2]
        self._work -= request.left
        return request

    def _tell_all(self, told: list[LookupRequest]) -> None:
        for request in told:
            self._tell(request)
