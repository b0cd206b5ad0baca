"""The managers' side of a registry. Each change is one function of the newest snapshot, atomic, and a new generation.

A change is written in this order: tables and records, the snapshot, CURRENT. If it is interrupted before CURRENT, it never
happened. If another manager was faster, it is made again from that one's snapshot.
"""

from __future__ import annotations

import getpass
import hashlib
import logging
import os
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hplm.clock import Clock
from hplm.errors import MISFITS, Broken, HplmError, InvalidInput, OutOfCapacity
from hplm.location import Location
from hplm.options import LEASE_SECONDS
from hplm.registry.folder import WRITING
from hplm.registry.opening import opened
from hplm.registry.pointer import Pointer, begin, is_begun, read_current
from hplm.registry.store import RECORDS, SNAPSHOTS, TABLES, Absent, Away, Busy, Conflict, ObjectStore, not_begun, objects_of
from hplm.tenants.change import Change, ChangeFiles
from hplm.tenants.snapshot import Ledger, Snapshot, files_of, newest_of
from hplm.tenants.state_folder import EXPORTED_TENANTS, REST_SECONDS, exported_folders

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CHANGES = "changes"
PATIENCE = 60.0  # seconds in which a change is made again and again
ORPHAN_SECONDS = 86400.0  # after which an object that no generation names belongs to no change on its way


class Registry:
    def __init__(self, store: ObjectStore, exported: Snapshot, clock: Clock = time) -> None:
        self.store = store
        self.exported = exported
        self._time = clock
        self.decided = self._told = 0  # the last generation that was made here, and that was written down

    def begin(self, lease_s: float = LEASE_SECONDS) -> bool:
        """Makes a registry with no change since the export, unless there is one. Returns whether it was made now."""
        return begin(self.store, lease_s)

    def begin_with(
        self, action: str, edit: Callable[[Change], object], lease_s: float, lost: Snapshot | None = None, lineage: str = ""
    ) -> bool:
        """Makes a registry whose first generation has this change, unless there is one. Without all of it there is none.

        `lost`: the newest generation of one without CURRENT. Its servers go on, so no number of it is used again. `lineage`: of
        that one, by which copies know it.
        """
        if is_begun(self.store, anew=lost is not None):
            return False
        before = lost or self.exported
        change = Change(ChangeFiles(self.store), before)
        edit(change)
        change.kept.write()
        after = self._after(before, action, change, self._time.time())
        return self._publish(Pointer(0, lineage or secrets.token_hex(8), lease_s=lease_s), None, after)

    def newest_remaining(self) -> Snapshot:
        """Returns the newest whole snapshot of a registry without CURRENT: the exported one if none is left."""
        names = [found.name.partition("/")[2] for found in self.store.names(SNAPSHOTS)]
        left = {int(number): name for name in names if (number := name.partition("-")[0]).isdecimal()}
        for number in sorted(left, reverse=True):
            with suppress(Broken):  # it goes on from the one before
                return self.at(Pointer(number, "", left))
        return self.exported

    def pointer(self) -> Pointer:
        """Returns what CURRENT says. Raises if there is no registry: nobody knows of keys and deletions since the export."""
        return self._seen()[0]

    def current(self) -> Snapshot:
        """Returns the newest snapshot."""
        return self.at(self.pointer())

    def change(self, action: str, edit: Callable[[Change], Result], kept: ChangeFiles | None = None) -> Result:
        """Makes a change, and publishes it unless `edit` raises or finds it empty. It may be called again, with a newer one.

        `kept`: what was written for it. Of that, only what the new generation needs stays.
        """
        kept = kept or ChangeFiles(self.store)
        try:
            return self._change(kept, action, edit)
        except (InvalidInput, Busy, OutOfCapacity):  # it was not made
            with suppress(OSError):  # on a read-only file system
                kept.delete_written()
            raise

    def _change(self, kept: ChangeFiles, action: str, edit: Callable[[Change], Result]) -> Result:
        until = self._time.monotonic() + PATIENCE
        while True:
            pointer, tag = self._seen()
            if pointer.copied is not None:
                raise InvalidInput(f"{self.store} is a copy of {pointer.copied.address}: change tenants there")
            before = self.at(pointer)
            self._tell(before)
            change = Change(kept, before)
            result = edit(change)
            if change.is_empty:
                kept.delete_written()
                return result
            kept.write()
            now = self._time.time()
            after = self._after(before, action, change, now)
            if self._publish(pointer if change.lease_s is None else pointer.leased(change.lease_s, now), tag, after):
                break
            if self._time.monotonic() > until:
                raise Busy(f"other managers have been changing {self.store} for {PATIENCE:.0f} s: try again")
            self._time.sleep(random.uniform(0, 0.05))
        self.decided = after.generation
        try:
            self._tell(after)
            kept.delete_written(needed_by(after))
            gone = [name for name, until in before.ledger.resting if until <= now]
            named = pointer.then(after.generation, "").snapshots
            gone += [f"{SNAPSHOTS}/{name}" for number, name in pointer.snapshots.items() if number not in named]
            self.store.delete(objects_of(self.store, gone))
            if after.ledger.swept == now:
                self.collect()
        except (HplmError, OSError) as error:  # the change is made
            log.warning("a later change finishes the clean-up of %s: %s", self.store, error)
        return result

    def set_lease(self, lease_s: float) -> None:
        def edit(change: Change) -> None:
            change.lease_s = lease_s
            change.details = {"seconds": lease_s}

        self.change("lease", edit)

    def audit(self) -> list[dict[str, Any]]:
        """Returns all changes, the oldest first."""
        newest = self.current()
        names = [found.name for found in self.store.names(CHANGES) if found.name.rpartition("/")[2].isdecimal()]
        try:
            changes = [msgspec.json.decode(self.store.get(name), type=dict[str, Any]) for name in names]
            before = [change for change in changes if change["generation"] < newest.generation]
            before.sort(key=lambda change: change["generation"])
        except (msgspec.DecodeError, *MISFITS) as error:
            raise Broken(f"{self.store}/{CHANGES} cannot be read ({error}): restore the registry") from None
        return [*before, newest.ledger.change] if newest.generation else []

    def collect(self) -> int:
        """Removes what no generation and no request can need any more. Returns its bytes."""
        now, pointer = self._time.time(), self.pointer()
        snapshot = self.at(pointer)
        resting = dict(snapshot.ledger.resting)
        needed = needed_by(snapshot) | {f"{SNAPSHOTS}/{name}" for name in pointer.snapshots.values()}
        gone = [
            found
            for folder in (RECORDS, SNAPSHOTS, TABLES, CHANGES)
            for found in self.store.names(folder)
            if (folder != CHANGES or found.name.endswith(WRITING))
            and (whole := _whole(found.name)) not in needed
            and resting.get(whole, found.written + ORPHAN_SECONDS) < now
        ]
        self.store.delete(found.name for found in gone)
        return sum(found.size for found in gone)

    def at(self, pointer: Pointer) -> Snapshot:
        return newest_of(self.store, pointer, self.exported)

    def _seen(self) -> tuple[Pointer, Any]:
        try:
            found = read_current(self.store)
        except Absent:
            raise not_begun(self.store) from None
        assert found is not None  # only a tag that was seen may still be the newest
        return found

    def _publish(self, pointer: Pointer, tag: Any, after: Snapshot) -> bool:
        """Returns whether this is the newest generation now. Another manager may have been faster."""
        content = after.written()
        name = f"{after.generation}-{hashlib.sha256(content).hexdigest()[:16]}"
        self.store.put(f"{SNAPSHOTS}/{name}", content)
        try:
            self.store.swap(pointer.then(after.generation, name).written(), tag)
            return True
        except OutOfCapacity:
            self.store.delete([f"{SNAPSHOTS}/{name}"])
            raise
        except (Conflict, Away, OSError) as error:
            if self._has(after.generation, name):
                log.warning("a change of %s is made, though %s", self.store, error or "its answer was lost")
                return True
            if not isinstance(error, Conflict):
                raise
            self.store.delete([f"{SNAPSHOTS}/{name}"])
            return False

    def _has(self, generation: int, name: str) -> bool:
        """Whether CURRENT names this snapshot."""
        with suppress(Absent):
            found = read_current(self.store)
            return found is not None and found[0].snapshots.get(generation) == name
        return False

    def _after(self, before: Snapshot, action: str, change: Change, now: float) -> Snapshot:
        tenants = [change.tenants[name] for name in sorted(change.tenants)]
        ledger = Ledger(change.next_uid, change.next_address, change.last_versions, tuple(change.before.values()))
        after = Snapshot(change.generation, change.branches, tenants, self.exported.export, ledger)
        freed = sorted(needed_by(before) - needed_by(after) - needed_by(self.exported))
        resting = [(name, until) for name, until in before.ledger.resting if until > now]
        swept = before.ledger.swept
        told = {
            "generation": change.generation,
            "at": datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds"),
            "who": _who(),
            "action": action,
        }
        after.ledger = replace(
            ledger,
            resting=(*resting, *((name, now + REST_SECONDS) for name in freed)),
            swept=now if now - swept > ORPHAN_SECONDS else swept,
            change={**told, **change.details},
        )
        return after

    def _tell(self, snapshot: Snapshot) -> None:
        """Writes down who has made a generation. Its manager may have been killed before it did."""
        if snapshot.generation > self._told:
            self.store.put(f"{CHANGES}/{snapshot.generation}", msgspec.json.encode(snapshot.ledger.change))
            self._told = snapshot.generation


def registries_of(repository: Path, state: Location, backbone: str | None = None) -> dict[str, Registry]:
    """Returns the registry of each exported backbone, or of the named one."""
    return {
        folder.parent.name: Registry(opened(state / folder.parent.name), Snapshot.load(folder / EXPORTED_TENANTS))
        for folder in exported_folders(repository, backbone)
    }


def needed_by(snapshot: Snapshot) -> set[str]:
    """Returns the records of a snapshot and the tables that were added since its export, by their names in the registry."""
    records = {f"{RECORDS}/{file}" for file in files_of((*snapshot.tenants, *snapshot.ledger.before))}
    return records | {f"{TABLES}/{branch.folder}/" for branch in snapshot.branches if branch.unique}


def _whole(name: str) -> str:
    """Returns the name under which something is removed: of a table's file, that of the table."""
    return f"{name.rpartition('/')[0]}/" if name.startswith(f"{TABLES}/") else name


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"
