"""Which tenants have a series of their own: so many that ask most, however many there are."""

from __future__ import annotations

import threading
from collections import Counter

REMEMBERED = 0.5  # of what was counted before the last choice
OTHERS = ""


class Busiest:
    """A tenant that is chosen starts its series then, and one that no longer is ends it: each request counts in one series."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._chosen: frozenset[str] = frozenset()

    def name(self, tenant: str) -> str:
        """Counts a request; under which name it is to be shown."""
        with self._lock:
            self._asked[tenant] += 1
            if len(self._chosen) < self._most:
                self._chosen |= {tenant}
            return tenant if tenant in self._chosen else OTHERS

    def shows(self, name: str) -> bool:
        """Whether requests are counted under this name now."""
        with self._lock:
            return name == OTHERS or name in self._chosen

    def choose(self) -> None:
        """Anew. Tenants that ask seldom are forgotten."""
        with self._lock:
            self._chosen = frozenset(tenant for tenant, _ in self._asked.most_common(self._most))
            faded = {tenant: count * REMEMBERED for tenant, count in self._asked.items()}
            self._asked = Counter({tenant: count for tenant, count in faded.items() if count >= REMEMBERED})
