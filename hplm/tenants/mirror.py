"""The copy of a registry on the machine of its servers. They read the copy, and one of them looks at the registry each second.

All that the registry removed is gone at the next look: tenants, keys, what limits allowed. New versions and new tenants come
when their tables and records are here; until then a tenant keeps its old version. So a copy may need several generations for
one of the registry, and counts its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hplm.adapters.record import has_content
from hplm.clock import Clock
from hplm.disk import check_room
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.plot.meta import TableMeta
from hplm.plot.table import Branch, BranchId
from hplm.registry import lease
from hplm.registry.folder import Folder, sync
from hplm.registry.follower import Follower
from hplm.registry.pointer import CopiedRegistry, Pointer
from hplm.registry.store import RECORDS, SNAPSHOTS, TABLES, Absent, Away, Denied, NotBegun, ObjectStore
from hplm.tenants.assembly import assemble
from hplm.tenants.snapshot import NAME, Snapshot, files_of, newest_of
from hplm.tenants.state_folder import EXPORTED_TABLES, EXPORTED_TENANTS, REST_SECONDS, StateFolder

log = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 1.0
BRINGING_SECONDS = 0.5  # how long records are brought before the registry is looked at again
ARRIVING = "arriving"  # the folder of tables that are not yet whole
AT_ONCE = 16  # records that are brought side by side
LATER = 5.0  # seconds until a table that failed is tried again
FREE_BYTES = 64 << 20  # of the disk that tables leave, so that changes of tenants always find room
BEGINNING_SECONDS = 5.0  # how long to wait for another process that copies
FIRST_SECONDS = 0.05  # between two looks while the first copy is made


class Mirror:
    """One process of a machine copies. The others only read, and one of them goes on if that process ends."""

    def __init__(self, folder: Path, store: ObjectStore, state: StateFolder, clock: Clock = time) -> None:
        """`folder`: of the exported backbone."""
        self._store = store
        self._state = state
        self._time = clock
        self._copy = Folder(state.folder)
        self._exported = Snapshot.load(folder / EXPORTED_TENANTS)
        self._exported_tables = folder / EXPORTED_TABLES
        self._exported_files = files_of(self._exported.tenants)
        self._lock: int | None = None
        self._follower = Follower(store, self._take, clock, longest_pause=0.0)
        self._wanted: tuple[Pointer, Snapshot]  # what CURRENT said last
        self._parents: dict[Branch, BranchId | None] = {}
        self.is_whole = False  # whether the copy serves all that it said
        self._broken = set[str]()  # record files of it that have another content than their names say
        self._newest: Snapshot | None = None  # of the copy
        self._until: dict[str, float] = {}  # when something that nothing names any more is removed
        self._sweep_at = 0.0
        self._tables = _Tables(state, store)

    def begin(self) -> None:
        """Makes the first copy, or sees that one has looked: an earlier copy is served where the registry is away."""
        began = lease.boot_time(self._time)
        while True:
            begun = self._state.pointer() is not None
            if not self._is_mine():
                waited = lease.boot_time(self._time) - began
                if begun and (lease.load(self._state.seen) >= began or waited > BEGINNING_SECONDS):
                    return
            else:
                try:
                    self.look()
                except HplmError as error:
                    is_refused = isinstance(error, InvalidInput) and not isinstance(error, Denied | NotBegun)
                    if is_refused or self._state.pointer() is None:
                        raise
                    log.warning("%s. %s", error, starts_from(self._state))
                    return
                if self._state.pointer() is not None:
                    return
                self.raise_failure()
            self._time.sleep(FIRST_SECONDS)

    def look(self) -> None:
        """Takes over what is new. Does nothing where another process of this machine does it."""
        if not self._is_mine():
            return
        self._follower.look()
        if self._state.pointer() is not None:
            lease.save(self._state.seen, self._follower.seen_at)
        if self._time.monotonic() >= self._sweep_at:  # also while something cannot be brought
            self._sweep(self._wanted[1])
        if not self.is_whole:
            self._bring(*self._wanted)

    def raise_failure(self) -> None:
        """Raises what keeps a table from coming."""
        for _, failure in self._tables.failed.values():
            raise failure

    def close(self) -> None:
        self._tables.close()
        if self._lock is not None:
            os.close(self._lock)

    def _is_mine(self) -> bool:
        if self._lock is None:
            self._state.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._state.folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
            except BlockingIOError:
                os.close(lock)
        return self._lock is not None

    def _take(self, pointer: Pointer) -> bool:
        """Takes over what CURRENT says: first what was removed. The rest is brought by later looks."""
        self._wanted = pointer, self._read(pointer)
        self.is_whole, self._sweep_at = False, 0.0
        self._broken.clear()
        self._publish(*self._wanted)
        if self.is_whole:
            self._tables.want(())  # one that was on its way is deleted
        return True

    def _read(self, pointer: Pointer) -> Snapshot:
        """Returns the newest snapshot of the registry. Raises if the copy here cannot be one of it."""
        local = self._state.pointer()
        if local is not None:
            self._check_same(pointer, local)
        snapshot = newest_of(self._store, pointer, self._exported)
        if snapshot.generation != pointer.generation or not all(NAME.fullmatch(branch.domain) for branch in snapshot.branches):
            raise Broken(
                f"{self._store} has another snapshot than that of generation {pointer.generation}: restore the registry"
            )
        return snapshot

    def _check_same(self, pointer: Pointer, local: Pointer) -> None:
        known = local.copied
        if known is None:
            raise InvalidInput(f"{self._state.folder} is a registry of its own and no copy: set HPLM_MIRROR to another folder")
        is_behind = pointer.generation < known.generation
        is_other = pointer.snapshots.get(known.generation, known.snapshot) != known.snapshot
        if local.lineage != pointer.lineage or is_behind or is_other:
            raise InvalidInput(
                f"{self._store} was begun anew, and {self._state.folder} is a copy of what it was: stop the servers that read "
                "this copy, and remove it"
            )

    def _bring(self, pointer: Pointer, wanted: Snapshot) -> None:
        """Brings records for a while, and has tables brought. One that cannot be brought holds up no other one."""
        until = self._time.monotonic() + BRINGING_SECONDS
        missing = sorted(self._missing(wanted))
        failures: list[HplmError] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while missing and self._time.monotonic() < until and not any(isinstance(error, Away) for error in failures):
                now, missing = missing[: 4 * AT_ONCE], missing[4 * AT_ONCE :]
                failures += [error for error in pool.map(self._bring_record, now) if error is not None]
        self._publish(pointer, wanted)
        self._tables.want([branch for branch in wanted.branches if not self._has_tables(branch)])
        if failures:
            raise failures[0]

    def _missing(self, wanted: Snapshot) -> set[str]:
        here = {path.name for path in self._state.records.glob("*")}
        return files_of(wanted.tenants) - here - self._exported_files

    def _bring_record(self, file: str) -> HplmError | None:
        """Returns why it cannot be brought."""
        try:
            content = self._store.get(f"{RECORDS}/{file}")
            if has_content(file, content):
                self._copy.put(f"{RECORDS}/{file}", content)
                return None
        except HplmError as error:
            return error
        self._broken.add(file)
        return Broken(f"{self._store}/{RECORDS}/{file} has another content than its name says: update its tenant")

    def _publish(self, pointer: Pointer, wanted: Snapshot) -> None:
        """Publishes what is here of the registry's snapshot, if that is more or less than the newest generation has."""
        local, newest, missing = self._state.pointer(), self._local(), self._missing(wanted)
        if local is None and not (missing <= self._broken and all(map(self._has_tables, wanted.branches))):
            return  # nothing is served before all is here that can come
        branches, tenants = assemble(wanted, newest, self._has_tables, self._parent, lambda own: not files_of([own]) & missing)
        is_whole = set(wanted.branches) <= set(branches) and tenants == wanted.tenants
        copied = CopiedRegistry(str(self._store), pointer.generation, pointer.snapshot)
        base = local or Pointer(0, pointer.lineage)
        after = Pointer(base.generation, pointer.lineage, base.snapshots, pointer.lease_s, copied=copied)
        if (branches, tenants) != (newest.branches, newest.tenants):
            snapshot = Snapshot(base.generation + 1, branches, tenants, self._exported.export, wanted.ledger)
            content = snapshot.written()
            name = f"{snapshot.generation}-{hashlib.sha256(content).hexdigest()[:16]}"
            self._copy.put(f"{SNAPSHOTS}/{name}", content)
            after = after.then(snapshot.generation, name)
        if after != local:
            self._copy.swap(after.written(), local.written() if local is not None else None)
        self.is_whole = is_whole

    def _local(self) -> Snapshot:
        """Returns the newest snapshot of the copy."""
        generation = self._state.current()
        if self._newest is None or self._newest.generation != generation:
            self._newest = self._state.load(generation) if generation else self._exported
        return self._newest

    def _has_tables(self, branch: Branch) -> bool:
        return (self._exported_tables / branch.folder).is_dir() or (self._state.tables / branch.folder).is_dir()

    def _parent(self, branch: Branch) -> BranchId | None:
        if branch not in self._parents:
            exported, own = self._exported_tables / branch.folder, self._state.tables / branch.folder
            self._parents[branch] = TableMeta.load((exported if exported.is_dir() else own) / "meta.json").parent_branch
        return self._parents[branch]

    def _sweep(self, wanted: Snapshot) -> None:
        """Removes what no generation of the last minute needs."""
        pointer, newest = self._state.pointer(), self._local()
        if pointer is None:
            return
        needed = {f"{RECORDS}/{file}" for file in files_of((*newest.tenants, *wanted.tenants))}
        needed |= {f"{TABLES}/{branch.folder}" for branch in (*newest.branches, *wanted.branches)}
        needed |= {f"{ARRIVING}/{branch.folder}" for branch in wanted.branches}
        needed |= {f"{SNAPSHOTS}/{name}" for name in pointer.snapshots.values()}
        folder = self._state.folder
        here = [path for kind in (RECORDS, SNAPSHOTS) for path in folder.glob(f"{kind}/*")]
        here += [path for kind in (TABLES, ARRIVING) for path in folder.glob(f"{kind}/*/*")]
        now = self._time.monotonic()
        self._sweep_at = now + REST_SECONDS / 2
        for path in here:
            name = str(path.relative_to(folder))
            if name in needed:
                self._until.pop(name, None)
            elif self._until.setdefault(name, now + REST_SECONDS) <= now:
                del self._until[name]
                with suppress(FileNotFoundError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def starts_from(copy: StateFolder) -> str:
    """Says that a server starts without its registry, for the log."""
    age = lease.boot_time() - lease.load(copy.seen)
    seen = f"{age:,.0f} s ago" if age < float("inf") else "before the machine was started"
    return f"This starts from the copy in {copy.folder}, which saw the registry {seen}"


class _Tables:
    """The tables on their way. They come in a thread of their own: one may take minutes, and a revoked key must not wait.

    An interrupted table goes on with the file where it stopped. When it is whole, its folder gets its name.
    """

    def __init__(self, state: StateFolder, store: ObjectStore) -> None:
        self._state = state
        self._store = store
        self._lock = threading.Lock()
        self._wanted: Sequence[Branch] = ()
        self.failed: dict[Branch, tuple[float, HplmError]] = {}  # when, and why, of wanted ones
        self._thread: threading.Thread | None = None  # while there is one to bring

    def want(self, branches: Sequence[Branch]) -> None:
        """Brings these tables, one after the other, and forgets all others. Call it again while one is missing."""
        with self._lock:
            self._wanted = branches
            self.failed = {branch: failed for branch, failed in self.failed.items() if branch in branches}
            if self._thread is None and self._due():
                self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self.want(())
        if (thread := self._thread) is not None:
            thread.join()

    def _due(self) -> list[Branch]:
        now = time.monotonic()
        return [one for one in self._wanted if one not in self.failed or now >= self.failed[one][0] + LATER]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not (due := self._due()):
                    self._thread = None
                    return
            branch, failure = due[0], None
            try:
                self._bring(branch)
            except (HplmError, OSError) as error:
                failure = error if isinstance(error, HplmError) else Broken(f"table {branch.folder}: {error}")
            with self._lock:
                if failure is None:
                    self._wanted = [one for one in self._wanted if one != branch]
                    self.failed.pop(branch, None)
                elif branch in self._wanted:
                    self.failed[branch] = time.monotonic(), failure
                    log.error("table %s cannot be brought: %s", branch.folder, failure)

    def _bring(self, branch: Branch) -> None:
        whole, arriving = self._state.tables / branch.folder, self._state.folder / ARRIVING / branch.folder
        if whole.is_dir():
            return
        found = list(self._store.names(f"{TABLES}/{branch.folder}"))
        if not found:
            raise Absent(f"{self._store} has no table {branch.folder}: restore the registry")
        here = {path.name: path.stat().st_size for path in arriving.glob("*")}
        missing = [one for one in found if here.get(Path(one.name).name) != one.size]
        needed = sum(one.size for one in missing) + FREE_BYTES
        check_room(self._state.folder, needed, f"table {branch.folder}", "free some space, or set HPLM_MIRROR to a larger disk")
        arriving.mkdir(parents=True, exist_ok=True)
        for one in missing:
            self._store.fetch(one.name, arriving / Path(one.name).name)
            if branch not in self._wanted:
                return
        for file in arriving.iterdir():
            sync(file)
        sync(arriving)
        whole.parent.mkdir(parents=True, exist_ok=True)
        arriving.rename(whole)
        sync(whole.parent)
