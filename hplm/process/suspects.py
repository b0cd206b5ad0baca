"""The tenants whose texts may have ended the engine: suspects run alone, and quarantined tenants are refused.

When the engine's process ends, all tenants with a text in a batch are suspects: each one runs alone for a while. If the engine
ends again while it computes one suspect alone, this one is guilty, and those that were suspected together with it are cleared.
The first end makes nobody guilty, because a machine without memory or a broken device may also end a process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

from hplm.clock import Clock
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.process.channel import Apart
from hplm.process.in_flight import Mark, backbone_of
from hplm.tenants.quarantine import SECONDS, Quarantine

log = logging.getLogger(__name__)
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
    """Has no threads and no clock. Tenants are known by their numbers.

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


class Separation:
    """The tenants that engines treat apart. Threads may share it."""

    def __init__(self, quarantines: Sequence[Quarantine], meters: Sequence[Meter], clock: Clock = time) -> None:
        """Quarantines and meters are by the number of the backbone."""
        self._meters = meters
        self._time = clock
        self._quarantines = quarantines
        self._unwritten: list[dict[str, float]] = [{} for _ in quarantines]  # until when tenants without a file are quarantined
        self._suspects = Suspects()
        self._lock = threading.Lock()
        self.apart = Apart(frozenset(), tuple(frozenset[str]() for _ in quarantines))
        self.look()

    def look(self) -> None:
        """Looks who runs alone now, and who is quarantined: time passes, and commands release tenants."""
        with self._lock:
            try:
                written = [quarantine.tenants(self._time.time(), own=True) for quarantine in self._quarantines]
            except OSError:  # this thread must go on
                log.exception("cannot look which tenants are quarantined: none is released")
                written = self.apart.quarantined
            now, both = self._time.monotonic(), zip(written, self._unwritten, strict=True)
            refused = tuple(of.union(tenant for tenant, until in more.items() if now < until) for of, more in both)
            apart = Apart(self._suspects.alone(now), refused)
            if apart != self.apart:  # the engine is told when it is another object
                self.apart = apart
        for number, meter in enumerate(self._meters):
            meter.set(names.SUSPECTED_TENANTS, sum(backbone_of(tenant) == number for tenant in apart.alone))
            meter.set(names.QUARANTINED_TENANTS, len(refused[number]))

    def answered(self, tenant: int) -> None:
        """Records that a request of this tenant was computed."""
        if tenant in self.apart.alone:
            with self._lock:
                self._suspects.answered(tenant)

    def ended(self, computed: Sequence[Mark]) -> None:
        """Records that an engine ended with these requests in its batches."""
        if not computed:
            return
        ids = {mark.tenant: mark.tenant_id for mark in computed}
        with self._lock:
            guilty = self._suspects.ended(ids.keys(), self._time.monotonic())
            what = "run alone for a while" if guilty is None else self._quarantine(backbone_of(guilty), ids[guilty])
        self.look()
        log.error("the engine ended while it computed requests of %s, which now %s", ", ".join(sorted(set(ids.values()))), what)

    def _quarantine(self, backbone: int, tenant_id: str) -> str:
        """Returns what became of the tenant, for the log."""
        try:
            self._quarantines[backbone].put(tenant_id)
        except OSError:
            log.exception("cannot write that tenant %s is quarantined", tenant_id)
            self._unwritten[backbone][tenant_id] = self._time.monotonic() + SECONDS
            return f"is quarantined for {SECONDS / 60:g} minutes or until a restart of the server: no command can release it"
        return "is quarantined"
