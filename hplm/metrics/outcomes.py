"""Counts requests by what their clients got. Only the busiest tenants have series of their own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from hplm.metrics import names
from hplm.metrics.busiest import OTHERS, Busiest
from hplm.metrics.meter import Meter, Series

BUSIEST = 20  # tenants with series of their own
SECONDS_BETWEEN_CHOICES = 30.0
# Of a request: domain, tenant, outcome, and the seconds from its arrival to its deadline, 0 if it has none.
Outcome = tuple[str, str, str, float]
_OF_TENANTS = {names.TENANT_REQUESTS, names.EXIT_AGREEMENT}


class Outcomes:
    """Of one backbone. Threads may share it."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._busiest = Busiest(BUSIEST)
        self._chosen_at = time.monotonic()

    def count(self, requests: Iterable[Outcome]) -> None:
        """Counts requests that were answered or refused."""
        counts: Counter[Series] = Counter()
        allowed: list[float] = []
        for domain, tenant, outcome, allowed_s in requests:
            counts[names.REQUESTS, (domain, outcome)] += 1
            counts[names.TENANT_REQUESTS, (self._busiest.name(tenant), outcome)] += 1
            if allowed_s:
                allowed.append(allowed_s)
        self.meter.add_all(counts)
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
