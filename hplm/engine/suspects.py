"""The tenants whose texts may have ended the engine. It has no threads, and no clock of its own: the time is a parameter.

When the engine's process ends, all tenants with a text in a batch are suspects: each one runs alone for a while. If the engine
ends again while it computes one suspect alone, this one is guilty, and those that were suspected together with it are cleared.
The first end makes nobody guilty, because a machine without memory or a broken device may also end a process.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

SUSPECTED_SECONDS = 600.0  # how long a tenant runs alone,
CLEAN_ANSWERS = 100  # unless so many of its requests were answered meanwhile: a busy tenant need not run alone for long
REMEMBERED_SECONDS = 86_400.0  # a tenant that is suspected again within this time runs alone for twice as long as before


@dataclass
class _Suspicion:
    since: float  # when the engine ended last while it computed this tenant
    until: float
    left: int  # answers that clear it
    times: int  # that the engine ended so


class Suspects:
    """Tenants are known by their numbers. A tenant in a batch ends the engine at most twice: in company, and alone."""

    def __init__(self) -> None:
        self._known: dict[int, _Suspicion] = {}  # also those that do not run alone any more

    def ended(self, tenants: Set[int], now: float) -> int | None:
        """Records that the engine ended while it computed these tenants. Returns the guilty one if that is known."""
        alone = self.alone(now)
        guilty = next(iter(tenants)) if len(tenants) == 1 and tenants <= alone else None
        if guilty is not None:
            together = self._known[guilty].since
            self._known = {tenant: one for tenant, one in self._known.items() if one.since != together or tenant == guilty}
        for tenant in tenants:
            times = self._known[tenant].times + 1 if tenant in self._known else 1
            factor = 2 ** (times - 1)
            until = now + SUSPECTED_SECONDS * factor if guilty is None else now + REMEMBERED_SECONDS
            self._known[tenant] = _Suspicion(now, until, CLEAN_ANSWERS * factor, times)
        return guilty

    def answered(self, tenant: int) -> None:
        """Records that a request of this tenant was computed, and the engine lives."""
        if tenant in self._known:
            self._known[tenant].left -= 1

    def alone(self, now: float) -> frozenset[int]:
        """Returns the tenants that run alone: while a text of one is in a batch, no other tenant's text is in any batch."""
        self._known = {
            tenant: one for tenant, one in self._known.items() if now < max(one.until, one.since + REMEMBERED_SECONDS)
        }
        return frozenset(tenant for tenant, one in self._known.items() if one.left > 0 and now < one.until)
