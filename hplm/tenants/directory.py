"""Finds the backbone of a tenant. It follows the newest snapshot of every backbone, without opening tables and records."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from hplm.clock import Clock
from hplm.errors import InvalidInput, NoTenant
from hplm.location import Location, local_folder
from hplm.registry.folder import Folder
from hplm.registry.follower import Follower, Looking
from hplm.registry.opening import opened
from hplm.registry.pointer import Pointer
from hplm.registry.store import Away, Denied, ObjectStore
from hplm.tenants.authorize import admit
from hplm.tenants.filter import filtered
from hplm.tenants.mirror import Mirror, starts_from
from hplm.tenants.snapshot import Snapshot, Tenant, newest_of
from hplm.tenants.state_folder import EXPORTED_TENANTS, SECONDS_BETWEEN_LOOKS, ReaderFile, StateFolder, exported_folders

log = logging.getLogger(__name__)


class Directory:
    def __init__(self, repository: Path, state: Location | None = None, clock: Clock = time, copied: bool = False) -> None:
        """The exports are read once, here as in the backbones; what is new in `state`, once it follows.

        `copied`: of a bucket, whether to read the copy that the models of this server keep.
        """
        self._backbones = {folder.parent.name: _Newest(folder, state, clock, copied) for folder in exported_folders(repository)}
        self._looking = [
            Looking(backbone.look, f"cannot read the newest tenants of backbone {name}")
            for name, backbone in self._backbones.items()
        ]

    def snapshots(self) -> list[Snapshot]:
        return [backbone.snapshot for backbone in self._backbones.values()]

    def find(self, parameters: Mapping[str, object], now: float) -> tuple[str, Tenant]:
        """Returns the tenant that a request names, and its backbone, from what is known. It reads no files.

        Raises NoTenant if the request may not use it.
        """
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

    def follow(self) -> None:
        """Looks from now on, in a thread for each backbone: a folder that hangs holds up nobody else. Managers wait for it."""
        for looking, (name, backbone) in zip(self._looking, self._backbones.items(), strict=True):
            backbone.reports = True
            looking.start(SECONDS_BETWEEN_LOOKS, f"tenants of {name}")

    def close(self) -> None:
        for looking in self._looking:
            looking.close()
        for backbone in self._backbones.values():
            backbone.close()


class _Newest:
    """The newest snapshot of one backbone."""

    def __init__(self, folder: Path, state: Location | None, clock: Clock, copied: bool) -> None:
        self._exported, self._folder = Snapshot.load(folder / EXPORTED_TENANTS), folder
        self.snapshot = filtered(self._exported, folder)
        self._name: str | None = ""  # of the snapshot in the registry; "": the exported one
        self._follower: Follower | None = None
        self._store: ObjectStore | None = None
        self._reader: ReaderFile | None = None
        self.reports = False  # whether managers wait for it
        if state is None:
            return
        store, copy = opened(state / folder.parent.name, clock), StateFolder(local_folder(state) / folder.parent.name)
        if isinstance(state, Path):
            self._reader = ReaderFile(copy)
        elif copied:
            mirror = Mirror(folder, store, copy)
            mirror.begin()
            mirror.close()  # the backbone's models go on with it
            store = Folder(copy.folder)
        self._store, self._follower = store, Follower(store, self._take, clock)
        try:
            self._follower.look()
        except (Away, Denied) as error:
            if isinstance(state, Path) or (pointer := copy.pointer()) is None:
                raise
            log.warning("%s. %s", error, starts_from(copy))
            self.snapshot, self._name = self._read(Folder(copy.folder), pointer), None

    def look(self) -> bool:
        if self._follower is None:
            return True
        is_whole = self._follower.look()
        if self._reader is not None and self.reports:
            self._reader.report(self.snapshot.generation)
        return is_whole

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _take(self, pointer: Pointer) -> bool:
        if pointer.snapshot != self._name:
            assert self._store is not None, "it is followed"
            self.snapshot, self._name = self._read(self._store, pointer), pointer.snapshot
        return True

    def _read(self, store: ObjectStore, pointer: Pointer) -> Snapshot:
        return filtered(newest_of(store, pointer, self._exported), self._folder)
