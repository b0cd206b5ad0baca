"""Gives a series of their own only to the busiest tenants, so that the number of series is limited."""

from __future__ import annotations

import threading
from collections import Counter

REMEMBERED = 0.5  # weight of earlier counts after each choice
OTHERS = ""


class Busiest:
    """Counts requests by tenant and chooses the busiest.

    A tenant's series starts when it is chosen, and ends when it no longer is. Each request counts in one series.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._chosen: frozenset[str] = frozenset()

    def name(self, tenant: str, requests: int = 1) -> str:
        """Counts requests. Returns the name of the series that they belong to."""
        with self._lock:
            self._asked[tenant] += requests
            if tenant not in self._chosen:
                if len(self._chosen) == self._most:
                    return OTHERS
                self._chosen |= {tenant}
            return tenant

    @property
    def chosen(self) -> frozenset[str]:
        """The tenants with series of their own now."""
        return self._chosen

    def choose(self) -> None:
        """Chooses the busiest tenants again, and forgets tenants with few requests."""
        with self._lock:
            self._chosen = frozenset(tenant for tenant, _ in self._asked.most_common(self._most))
            faded = {tenant: count * REMEMBERED for tenant, count in self._asked.items()}
            self._asked = Counter({tenant: count for tenant, count in faded.items() if count >= REMEMBERED})
