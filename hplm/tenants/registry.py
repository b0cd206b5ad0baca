"""The managers' side of a live state. Managers make one change at a time. Each change is atomic and a new generation.

A change is written in this order: new tables and banks, the snapshot, the registry, CURRENT. If it is interrupted before the
registry is written, it never happened. After that, the next manager publishes it. Readers never open the registry, so a locked
or broken registry delays managers, but no request.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from hplm.adapters.record import Record
from hplm.errors import Broken, OutOfCapacity, QueueFull
from hplm.plot.branch import Branch
from hplm.tenants.snapshot import LIMITS, LIVE, Snapshot, Tenant, read_tenant
from hplm.tenants.state import REST_SECONDS, State

log = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 16
SETTINGS = ("keys", *LIMITS, "homes")  # of a tenant, the same for all its versions
PATIENCE = 60.0  # seconds that a manager waits for another one
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS audit (generation INTEGER PRIMARY KEY, at TEXT, who TEXT, action TEXT, details TEXT);
CREATE TABLE IF NOT EXISTS before (tenant TEXT PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions (uid INTEGER PRIMARY KEY, last INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS resting (bank TEXT, record INTEGER, until REAL, PRIMARY KEY (bank, record));
"""


class Busy(QueueFull):
    """Another manager is changing the same state, and this change was not begun."""


@dataclass
class Change:
    """The next generation, while a manager edits it."""

    generation: int
    tenants: dict[str, Tenant]
    branches: list[Branch]
    next_address: int
    next_uid: int
    before: dict[str, Tenant]  # the version that each tenant can be rolled back to
    versions: dict[int, int]  # the last used version, by uid
    resting: set[tuple[str, int]]  # records that a reader may still hold
    details: dict[str, Any] = field(default_factory=dict[str, Any])  # for the audit log
    _taken: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])  # records written by this change

    def put(self, tenant: Tenant) -> None:
        """Adds a tenant or its next version, and keeps the version before for a rollback."""
        if tenant.id in self.tenants:
            self.before[tenant.id] = self.tenants[tenant.id]
        self.tenants[tenant.id] = tenant
        self.versions[tenant.uid] = max(tenant.version, self.versions.get(tenant.uid, 0))

    def replace(self, tenant: Tenant) -> None:
        """Replaces a tenant's settings, within the same version."""
        self.tenants[tenant.id] = tenant

    def roll_back(self, tenant_id: str) -> Tenant:
        """Returns a tenant to its version before, with the current keys and limits."""
        now, then = self.tenants[tenant_id], self.before.pop(tenant_id)
        settings = {name: getattr(now, name) for name in SETTINGS}
        self.tenants[tenant_id] = replace(then, **settings)
        return self.tenants[tenant_id]

    def remove(self, tenant_id: str) -> None:
        del self.tenants[tenant_id]
        self.forget(tenant_id)

    def forget(self, tenant_id: str) -> None:
        """Forgets a tenant's version before, so that it cannot be rolled back."""
        self.before.pop(tenant_id, None)

    def new_uid(self) -> int:
        """Returns a uid that is never used twice, because slots and tickets may still name a deleted tenant."""
        self.next_uid += 1
        return self.next_uid - 1

    def next_version(self, tenant_id: str) -> int:
        """Returns the tenant's next version. No version is used twice, not even after a rollback."""
        tenant = self.tenants.get(tenant_id)
        return max(self.versions.get(tenant.uid, 0), tenant.version) + 1 if tenant is not None else 1

    def records(self) -> set[tuple[str, int]]:
        known = (*self.tenants.values(), *self.before.values())
        return {(record.bank, record.index) for tenant in known for record in tenant.records()}

    def records_of(self, bank: str) -> set[int]:
        """Returns the records of a bank that must not be overwritten: those in use, and those that were freed recently."""
        return {index for name, index in self.records() | self.resting | self._taken if name == bank}

    def take(self, record: Record) -> None:
        self._taken.add((record.bank, record.index))

    def add_branch(self, domain: str, version: int, size: int) -> Branch:
        """Adds a branch with new addresses. No address is used twice, because tickets may still name a deleted table."""
        branch = Branch(domain, version, self.next_address)
        self.branches.append(branch)
        self.next_address += size
        return branch


class Registry:
    def __init__(self, state: State, exported: Snapshot, first_address: int, first_uid: int) -> None:
        """`first_address` and `first_uid` are the first that the export does not use."""
        self.state = state
        self._exported = exported
        self._first = {"next address": first_address, "next uid": first_uid}
        self.decided = 0  # the last generation that was decided here

    @contextmanager
    def change(self, action: str) -> Generator[Change, None, None]:
        """Publishes the edits of the change when the block ends, or nothing if the block raises."""
        with self._opened() as database:
            snapshot = self._newest(database)
            change = self._begin(database, snapshot)
            records = change.records()
            yield change
            self._write(database, action, change, records - change.records())
        self.decided = change.generation
        self.finish()

    def finish(self) -> None:
        """Publishes the last decided generation, and removes files that no generation needs.

        The change is made, even if this fails: `Manager.settle` and the next manager try again.
        """
        try:
            with self._opened() as database:
                self._sweep(self._newest(database), database)
        except (Busy, OSError) as error:
            log.warning("the change is made; the next change finishes the clean-up of %s: %s", self.state.folder, error)

    def check_begun(self) -> None:
        """Raises if there is no state, so that a mistaken path does not become one. A lost CURRENT is published again."""
        self.state.refuse_copy()
        if not any(self.state.snapshots.glob("*")):
            self.state.check_begun()

    def current(self) -> Snapshot:
        """Returns the published snapshot. First publishes a decided change that was interrupted."""
        with self._opened() as database:
            return self._newest(database)

    @contextmanager
    def frozen(self) -> Generator[tuple[Snapshot, sqlite3.Connection], None, None]:
        """Yields the published snapshot and the registry. No manager can change them meanwhile."""
        self.check_begun()
        with self._opened() as database:
            yield self._newest(database), database

    def audit(self) -> list[dict[str, Any]]:
        with self._opened() as database:
            rows = database.execute("SELECT generation, at, who, action, details FROM audit ORDER BY generation").fetchall()
        names = ("generation", "at", "who", "action")
        return [{**dict(zip(names, row[:4], strict=True)), **json.loads(row[4])} for row in rows]

    @contextmanager
    def _opened(self) -> Generator[sqlite3.Connection, None, None]:
        """Opens the registry in a transaction that excludes all other managers."""
        self.state.refuse_copy()
        self.state.snapshots.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.state.registry, timeout=PATIENCE, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA.split(";"):
                database.execute(statement)
            yield database
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise Busy(f"another manager has been changing {self.state.folder} for {PATIENCE:.0f} s: try again") from None
            kind = OutOfCapacity if "is full" in str(error) else Broken
            raise kind(f"cannot use {self.state.registry}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise Broken(
                f"{self.state.registry} is broken ({error}): restore the state. Published tenants are still served"
            ) from error
        finally:
            database.close()  # without COMMIT, nothing is written

    def _newest(self, database: sqlite3.Connection) -> Snapshot:
        decided = database.execute("SELECT max(generation) FROM audit").fetchone()[0] or 0
        published = self.state.current()
        if published < decided:
            self._publish(decided)
        elif published > decided:
            raise Broken(
                f"{self.state.folder} publishes generation {published}, but its registry ends with {decided}: restore the state"
            )
        if not decided:
            return self._exported
        snapshot = self.state.load(decided)
        if snapshot.export != self._exported.export:
            raise Broken(f"{self.state.folder} belongs to another export: name its own repository, or an empty --state")
        return snapshot

    def _begin(self, database: sqlite3.Connection, snapshot: Snapshot) -> Change:
        facts = {**self._first, **dict(database.execute("SELECT name, value FROM facts"))}
        database.execute("DELETE FROM resting WHERE until < ?", (time.time(),))
        before = [read_tenant(json.loads(entry)) for (entry,) in database.execute("SELECT entry FROM before")]
        return Change(
            generation=snapshot.generation + 1,
            tenants={tenant.id: tenant for tenant in snapshot.tenants},
            branches=list(snapshot.branches),
            next_address=facts["next address"],
            next_uid=facts["next uid"],
            versions=dict(database.execute("SELECT uid, last FROM versions")),
            resting=set(database.execute("SELECT bank, record FROM resting")),
            before={tenant.id: tenant for tenant in before},
        )

    def _write(self, database: sqlite3.Connection, action: str, change: Change, freed: set[tuple[str, int]]) -> None:
        """Writes the snapshot, then the registry's rows. The transaction makes these rows one atomic decision."""
        tenants = [change.tenants[name] for name in sorted(change.tenants)]
        snapshot = Snapshot(change.generation, change.branches, tenants, self._exported.export)
        snapshot.save(self.state.snapshots / str(change.generation))
        self.state.sync_folders()
        database.execute("DELETE FROM before")
        entries = [(tenant.id, json.dumps(asdict(tenant))) for tenant in change.before.values()]
        database.executemany("INSERT INTO before VALUES (?, ?)", entries)
        facts = {"next address": change.next_address, "next uid": change.next_uid}
        database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        database.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?)", change.versions.items())
        until = time.time() + REST_SECONDS
        database.executemany("INSERT OR REPLACE INTO resting VALUES (?, ?, ?)", [(*record, until) for record in freed])
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        row = (change.generation, at, _who(), action, json.dumps(change.details))
        database.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?)", row)

    def _sweep(self, snapshot: Snapshot, database: sqlite3.Connection) -> None:
        """Removes files that no generation needs, and those of interrupted changes. Readers keep their files open."""
        tables = {branch.folder for branch in snapshot.branches}
        for folder in self.state.tables.glob("*/*"):
            if f"{folder.parent.name}/{folder.name}" not in tables:
                shutil.rmtree(folder)
        self.state.sweep_aside()
        banks = needed_banks(snapshot, database)
        for file in self.state.banks.glob("*"):
            if LIVE + file.name not in banks:
                file.unlink()
        self.state.forget_readers()
        for file in self.state.snapshots.glob("*"):
            if not file.name.isdecimal() or int(file.name) <= snapshot.generation - KEPT_SNAPSHOTS:
                file.unlink()

    def _publish(self, generation: int) -> None:
        self.state.publish(generation)


def needed_banks(snapshot: Snapshot, database: sqlite3.Connection) -> set[str]:
    """Returns the names of all banks that tenants need, now or after a rollback."""
    before = [read_tenant(json.loads(entry)) for (entry,) in database.execute("SELECT entry FROM before")]
    return {record.bank for tenant in (*snapshot.tenants, *before) for record in tenant.records()}


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"
