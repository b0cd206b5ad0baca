"""The tenants whose texts may have ended the engine: suspects run alone, and quarantined tenants are refused for a while.

When the engine's process ends, all tenants with a text in a batch are suspects: each one runs alone for a while. If the engine
ends again while it computes one suspect alone, this one is guilty, and those that were suspected together with it are cleared.
The first end makes nobody guilty, because a machine without memory or a broken device may also end a process. All this is in
the memory of the model process, and ends with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

from hplm.clock import Clock
from hplm.errors import Quarantined
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.process.channel import Apart
from hplm.process.in_flight import InFlightEntry

log = logging.getLogger(__name__)
SUSPECTED_SECONDS = 600.0  # how long a tenant runs alone,
CLEAN_ANSWERS = 100  # unless so many of its requests were answered meanwhile: a busy tenant need not run alone for long
REFUSED_SECONDS = 600.0  # how long a guilty tenant is refused
REMEMBERED_SECONDS = 86_400.0  # a tenant that ends the engine again within this time runs alone, or is refused, twice as long


@dataclass
class _Suspicion:
    since: float  # when the engine ended last while it computed this tenant
    until: float
    left: int  # answers that clear it
    times: int  # that the engine ended so
    refused_until: float


class Suspects:
    """Has no threads and no clock. Tenants are known by their uids.

    A tenant in a batch ends the engine at most twice: in company, and alone.
    """

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
            refused_until = now if guilty is None else now + REFUSED_SECONDS * factor / 2  # it is the second end at least
            self._known[tenant] = _Suspicion(now, until, CLEAN_ANSWERS * factor, times, refused_until)
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

    def refused(self, now: float) -> frozenset[int]:
        """Returns the tenants that are refused."""
        return frozenset(tenant for tenant, one in self._known.items() if now < one.refused_until)


class Separation:
    """The tenants that engines treat apart. Threads may share it."""

    def __init__(self, meter: Meter, clock: Clock = time) -> None:
        self._meter = meter
        self._time = clock
        self._suspects = Suspects()
        self._lock = threading.Lock()
        self.apart = Apart(frozenset(), frozenset())
        self.look()

    def look(self) -> None:
        """Looks who runs alone now, and who is refused, because time passes."""
        with self._lock:
            now = self._time.monotonic()
            apart = Apart(self._suspects.alone(now), self._suspects.refused(now))
            if apart != self.apart:  # the engine is told when it is another object
                self.apart = apart
        self._meter.set(names.SUSPECTED_TENANTS, len(apart.alone))
        self._meter.set(names.QUARANTINED_TENANTS, len(apart.refused))

    def answered(self, tenant: int) -> None:
        """Records that a request of this tenant was computed."""
        if tenant in self.apart.alone:
            with self._lock:
                self._suspects.answered(tenant)

    def ended(self, computed: Sequence[InFlightEntry]) -> None:
        """Records that an engine ended with these requests in its batches."""
        if not computed:
            return
        ids = {entry.tenant: entry.tenant_id for entry in computed}
        with self._lock:
            guilty = self._suspects.ended(ids.keys(), self._time.monotonic())
        self.look()
        what = "run alone for a while" if guilty is None else "is quarantined for a while"
        log.error("the engine ended while it computed requests of %s, which now %s", ", ".join(sorted(set(ids.values()))), what)


def refusal(tenant_id: str) -> Quarantined:
    """Returns the error for a request of a quarantined tenant."""
    return Quarantined(
        f"tenant {tenant_id!r} is refused for {REFUSED_SECONDS / 60:g} minutes, or longer if this was not the first time, "
        "because the engine ended twice while it computed its requests: find the cause in the server's log"
    )
