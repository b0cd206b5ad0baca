"""Counts requests by what their clients got. Only the busiest tenants have series of their own."""

from __future__ import annotations

import time

from hplm.metrics import names
from hplm.metrics.busiest import OTHERS, Busiest
from hplm.metrics.meter import Meter, Series

BUSIEST = 20  # tenants with series of their own
SECONDS_BETWEEN_CHOICES = 30.0
_OF_TENANTS = {names.TENANT_REQUESTS, names.EXIT_AGREEMENT}


class Outcomes:
    """Of one backbone. Threads may share it."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._busiest = Busiest(BUSIEST)
        self._chosen_at = time.monotonic()

    def count(self, domain: str, tenant: str, outcome: str, allowed_s: float) -> None:
        """Counts a request that was answered or refused. `allowed_s`: from its arrival to its deadline; 0: it has none."""
        shown = self._busiest.name(tenant)
        self.meter.add_all({(names.REQUESTS, (domain, outcome)): 1, (names.TENANT_REQUESTS, (shown, outcome)): 1})
        if allowed_s:
            self.meter.observe(names.DEADLINE_SECONDS, [allowed_s])

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
