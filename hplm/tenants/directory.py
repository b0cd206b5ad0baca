"""Finds the backbone of a tenant. It follows the newest snapshot of every backbone, without opening tables and records."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hplm.errors import Broken, HplmError, InvalidInput, NoTenant
from hplm.registry.folder import Folder
from hplm.registry.pointer import read_current
from hplm.registry.store import Absent, Place, Remote, Store, local, not_begun, opened
from hplm.tenants.authorize import admit
from hplm.tenants.filter import filtered
from hplm.tenants.mirror import Mirror
from hplm.tenants.snapshot import Snapshot, Tenant, newest_of
from hplm.tenants.state import EXPORTED_TENANTS, SECONDS_BETWEEN_LOOKS, State, exported_folders

log = logging.getLogger(__name__)
PAUSE = 10.0  # seconds until a snapshot that could not be read is tried again: it may be large, and requests wait


class Directory:
    def __init__(
        self,
        repository: Path,
        state: Place | None = None,
        clock: Callable[[], float] = time.monotonic,
        copied: bool = False,
    ) -> None:
        """The exports are read once, here as in the backbones. `state` is read again for new generations.

        `copied`: of a bucket, whether to read the copy that the models of this server keep.
        """
        self._clock = clock
        self._backbones = {
            folder.parent.name: _Newest(folder, _store(folder, state, copied), clock) for folder in exported_folders(repository)
        }
        self._looking = threading.Lock()
        self._looked_at = clock()
        self._logged: dict[str, str] = {}  # the last failure of each backbone, so that each failure is logged once

    def snapshots(self) -> list[Snapshot]:
        return [backbone.snapshot for backbone in self._backbones.values()]

    def generations(self) -> dict[str, int]:
        """Returns the generation of each backbone's snapshot."""
        return {name: backbone.snapshot.generation for name, backbone in self._backbones.items()}

    def find(self, parameters: Mapping[str, object], now: float) -> tuple[str, Tenant]:
        """Returns the tenant that a request names, and its backbone. Raises NoTenant if the request may not use it."""
        if self._clock() - self._looked_at >= SECONDS_BETWEEN_LOOKS and self._looking.acquire(blocking=False):
            try:
                self.look()
            finally:
                self._looking.release()
        try:
            return self._find(parameters, now)
        except NoTenant:  # its backbone may already serve a newer snapshot
            with self._looking:
                self.look()
            return self._find(parameters, now)

    def _find(self, parameters: Mapping[str, object], now: float) -> tuple[str, Tenant]:
        found: list[tuple[str, Tenant]] = []
        for name, backbone in self._backbones.items():
            try:
                found.append((name, admit(backbone.snapshot, parameters, now)))
            except NoTenant:
                continue
        if not found:
            raise NoTenant
        if len(found) > 1:
            names = ", ".join(repr(name) for name, _ in found)
            raise InvalidInput(
                f"several backbones have a tenant {found[0][1].id!r}: send the request to one of the models {names}"
            )
        return found[0]

    def look(self) -> None:
        """Reads the newest snapshots. Not while another thread does."""
        self._looked_at = self._clock()
        for name, backbone in self._backbones.items():
            try:
                backbone.refresh()
                self._logged.pop(name, None)
            except (HplmError, OSError) as error:  # the last snapshot that was read stays in use
                if self._logged.get(name) != str(error):
                    self._logged[name] = str(error)
                    log.error("cannot read the newest tenants of backbone %s: %s", name, error)


class _Newest:
    """The newest snapshot of one backbone."""

    def __init__(self, folder: Path, store: Store | None, clock: Callable[[], float]) -> None:
        self._exported, self._folder = Snapshot.load(folder / EXPORTED_TENANTS), folder
        self.snapshot = filtered(self._exported, folder)
        self._store = store
        self._clock = clock
        self._tag: object = None  # of the CURRENT that was read last
        self._failed: tuple[object, float, HplmError] | None = None  # the tag of one that was not, when, and why
        self.refresh()

    def refresh(self) -> None:
        if self._store is None:
            return
        try:
            found = read_current(self._store, self._tag)
        except Absent:
            raise not_begun(self._store) from None
        if found is None:
            return
        pointer, tag = found
        if pointer.generation != self.snapshot.generation:
            if self._failed is not None and self._failed[0] == tag and self._clock() < self._failed[1] + PAUSE:
                raise self._failed[2].with_traceback(None)
            try:
                self.snapshot = filtered(newest_of(self._store, pointer, self._exported), self._folder)
            except (Broken, InvalidInput) as error:  # it stays so; a store that is away does not
                self._failed = tag, self._clock(), error
                raise
        self._tag = tag


def _store(folder: Path, state: Place | None, copied: bool) -> Store | None:
    if state is None:
        return None
    store = opened(state / folder.parent.name)
    if not copied or not isinstance(state, Remote):
        return store
    copy = local(state) / folder.parent.name
    mirror = Mirror(folder, store, State(copy))
    mirror.begin()
    mirror.close()  # the backbone's models go on with it
    return Folder(copy)
