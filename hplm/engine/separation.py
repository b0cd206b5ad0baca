"""The tenants that engines treat apart: suspects run alone, and quarantined tenants are refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hplm.engine.channel import Apart
from hplm.engine.in_flight import Mark, backbone_of
from hplm.engine.suspects import Suspects
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.tenants.quarantine import SECONDS, Quarantine

log = logging.getLogger(__name__)


class Separation:
    """Threads may share it."""

    def __init__(self, folders: Sequence[Path], meters: Sequence[Meter]) -> None:
        """`folders` are those of the backbones' versions. Folders and meters are by the number of the backbone."""
        self._meters = meters
        self._quarantines = [Quarantine(folder.parent) for folder in folders]
        self._unwritten: list[dict[str, float]] = [{} for _ in folders]  # until when tenants without a file are quarantined
        self._suspects = Suspects()
        self._lock = threading.Lock()
        self.apart = Apart(frozenset(), tuple(frozenset[str]() for _ in folders))
        self.look()

    def look(self) -> None:
        """Looks who runs alone now, and who is quarantined: time passes, and commands release tenants."""
        with self._lock:
            try:
                written = [quarantine.tenants(time.time(), own=True) for quarantine in self._quarantines]
            except OSError:  # this thread must go on
                log.exception("cannot look which tenants are quarantined: none is released")
                written = self.apart.quarantined
            now, both = time.monotonic(), zip(written, self._unwritten, strict=True)
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
            guilty = self._suspects.ended(ids.keys(), time.monotonic())
            what = "run alone for a while" if guilty is None else self._quarantine(backbone_of(guilty), ids[guilty])
        self.look()
        log.error("the engine ended while it computed requests of %s, which now %s", ", ".join(sorted(set(ids.values()))), what)

    def _quarantine(self, backbone: int, tenant_id: str) -> str:
        """Returns what became of the tenant, for the log."""
        try:
            self._quarantines[backbone].put(tenant_id)
        except OSError:
            log.exception("cannot write that tenant %s is quarantined", tenant_id)
            self._unwritten[backbone][tenant_id] = time.monotonic() + SECONDS
            return f"is quarantined for {SECONDS / 60:g} minutes or until a restart of the server: no command can release it"
        return "is quarantined"
