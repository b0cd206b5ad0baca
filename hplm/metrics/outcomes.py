"""Counts requests by what their clients got. Only the busiest tenants have series of their own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from hplm.metrics import names
from hplm.metrics.meter import Meter, Series

BUSIEST = 20  # tenants with series of their own
SECONDS_BETWEEN_CHOICES = 30.0
REMEMBERED = 0.5  # weight of earlier counts after each choice
OTHERS = ""  # the series of all other tenants
Outcome = tuple[str, str, str]  # of a request: domain, tenant, outcome
_OF_TENANTS = {names.TENANT_REQUESTS, names.EXIT_AGREEMENT}


def outcome_of(deadline_ns: int, now_ns: int) -> str:
    """Returns the outcome of a request that is answered now. Without a deadline, `deadline_ns` is 0."""
    if not deadline_ns:
        return "answered"
    return "on_time" if now_ns <= deadline_ns else "late"


class Outcomes:
    """Of one backbone. Threads may share it. The meter knows what was counted after `settle`.

    A tenant's series starts when it is chosen, and ends when it no longer is. Each request counts in one series.
    """

    def __init__(self, meter: Meter, most: int = BUSIEST) -> None:
        self.meter = meter
        self._most = most
        self._lock = threading.Lock()
        self._counted: Counter[Outcome] = Counter()
        self._allowed: list[float] = []
        self._asked: Counter[str] = Counter()  # requests by tenant
        self._chosen: frozenset[str] = frozenset()  # the tenants with series of their own
        self._chosen_at = time.monotonic()

    def count(self, requests: Sequence[Outcome], allowed: Sequence[float]) -> None:
        """Counts requests that were answered or refused. `allowed`: of those with a deadline, seconds from arrival to it."""
        with self._lock:
            self._counted.update(requests)
            self._allowed += allowed

    def settle(self) -> None:
        """Passes the counts on to the meter: not for each request, because that would take much of the time of an answer."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
            allowed, self._allowed = self._allowed, []
        for (domain, tenant, outcome), requests in counted.items():
            self.meter.add(names.REQUESTS, requests, domain, outcome)
            self.meter.add(names.TENANT_REQUESTS, requests, self._series(tenant, requests), outcome)
        if allowed:
            self.meter.observe(names.DEADLINE_SECONDS, allowed)

    def _series(self, tenant: str, requests: int) -> str:
        """Counts requests of a tenant. Returns the name of the series that they belong to."""
        with self._lock:
            self._asked[tenant] += requests
            if tenant not in self._chosen:
                if len(self._chosen) == self._most:
                    return OTHERS
                self._chosen |= {tenant}
            return tenant

    def choose(self) -> None:
        """Chooses the busiest tenants again, and forgets tenants with few requests."""
        with self._lock:
            self._chosen = frozenset(tenant for tenant, _ in self._asked.most_common(self._most))
            faded = {tenant: count * REMEMBERED for tenant, count in self._asked.items()}
            self._asked = Counter({tenant: count for tenant, count in faded.items() if count >= REMEMBERED})

    def look(self) -> None:
        """Chooses again from time to time. Call it once a second."""
        now = time.monotonic()
        if now - self._chosen_at > SECONDS_BETWEEN_CHOICES:
            self.choose()
            self._chosen_at = now

    def keeps(self, series: Series) -> bool:
        """Whether a series is published."""
        metric, labels = series
        return metric not in _OF_TENANTS or labels[0] in (OTHERS, *self._chosen)
