"""Which backbone of a repository a tenant belongs to: the newest snapshot of each, without the tables and banks it names."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hplm.errors import Broken, HplmError, InvalidInput, NoTenant
from hplm.tenants.authorize import admit
from hplm.tenants.snapshot import Snapshot, Tenant
from hplm.tenants.state import EXPORTED_TENANTS, SECONDS_BETWEEN_LOOKS, State

log = logging.getLogger(__name__)


class Directory:
    def __init__(self, repository: Path, state: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """What is exported is read once, as the backbones themselves do; `state` is looked at again and again."""
        self._clock = clock
        self._backbones = {
            path.parent.parent.name: _Newest(path, state / path.parent.parent.name if state is not None else None)
            for path in sorted(repository.glob(f"*/1/{EXPORTED_TENANTS}"))
        }
        self._looking = threading.Lock()
        self._looked_at = clock()
        self._said: dict[str, str] = {}  # of each backbone, so that a failure is logged once

    def snapshots(self) -> list[Snapshot]:
        return [backbone.snapshot for backbone in self._backbones.values()]

    def find(self, parameters: Mapping[str, object], now: float) -> tuple[str, Tenant]:
        """The backbone of the tenant that a request names and may use, and the tenant."""
        if self._clock() - self._looked_at >= SECONDS_BETWEEN_LOOKS and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        try:
            return self._find(parameters, now)
        except NoTenant:  # perhaps not yet: a tenant is served as soon as its backbone serves it
            with self._looking:
                self._look()
            return self._find(parameters, now)

    def _find(self, parameters: Mapping[str, object], now: float) -> tuple[str, Tenant]:
        found = []
        for name, backbone in self._backbones.items():
            try:
                found.append((name, admit(backbone.snapshot, parameters, now)))
            except NoTenant:
                continue
        if not found:
            raise NoTenant
        if len(found) > 1:
            names = ", ".join(repr(name) for name, _ in found)
            raise InvalidInput(f"tenant {found[0][1].id!r} is known to several backbones: ask one of the models {names}")
        return found[0]

    def _look(self) -> None:
        self._looked_at = self._clock()
        for name, backbone in self._backbones.items():
            try:
                backbone.refresh()
                self._said.pop(name, None)
            except (HplmError, OSError) as error:  # what was known of it stays known
                if self._said.get(name) != str(error):
                    self._said[name] = str(error)
                    log.error("the newest tenants of backbone %s cannot be read: %s", name, error)


class _Newest:
    """The newest snapshot of one backbone."""

    def __init__(self, exported: Path, state: Path | None) -> None:
        self.snapshot = Snapshot.load(exported)
        self._state = State(state) if state is not None else None
        self.refresh()

    def refresh(self) -> None:
        generation = self._state.current() if self._state is not None else 0
        if generation == self.snapshot.generation:
            return
        newest = self._state.load(generation)
        if newest.export != self.snapshot.export:
            raise Broken(f"{self._state.folder} belongs to another export: serve it with the repository it was made for")
        self.snapshot = newest
