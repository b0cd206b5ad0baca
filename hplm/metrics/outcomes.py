"""Counts requests by what their clients got. Only the busiest tenants have series of their own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from hplm.metrics import names
from hplm.metrics.busiest import OTHERS, Busiest
from hplm.metrics.meter import Meter, Series

BUSIEST = 20  # tenants with series of their own
SECONDS_BETWEEN_CHOICES = 30.0
Outcome = tuple[str, str, str]  # of a request: domain, tenant, outcome
_OF_TENANTS = {names.TENANT_REQUESTS, names.EXIT_AGREEMENT}


class Outcomes:
    """Of one backbone. Threads may share it. The meter knows what was counted after `settle`."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._busiest = Busiest(BUSIEST)
        self._chosen_at = time.monotonic()
        self._lock = threading.Lock()
        self._counted: Counter[Outcome] = Counter()
        self._allowed: list[float] = []

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
            self.meter.add(names.TENANT_REQUESTS, requests, self._busiest.name(tenant, requests), outcome)
        if allowed:
            self.meter.observe(names.DEADLINE_SECONDS, allowed)

    def look(self) -> None:
        """Chooses the busiest tenants again from time to time. Call it once a second."""
        now = time.monotonic()
        if now - self._chosen_at > SECONDS_BETWEEN_CHOICES:
            self._busiest.choose()
            self._chosen_at = now

    def keeps(self, series: Series) -> bool:
        """Whether a series is published."""
        metric, labels = series
        return metric not in _OF_TENANTS or labels[0] in (OTHERS, *self._busiest.chosen)
