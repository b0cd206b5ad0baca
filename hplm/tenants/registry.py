"""Managers' side of a live state: one change at a time, each a new generation, whole or not at all.

A change is written in this order: what it adds (tables, banks), the snapshot, the registry, CURRENT. Cut before the registry
has it, it never was; cut after, the next manager publishes it. Readers never open the registry, so a locked or broken one
delays managers and no request.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from hplm.adapters.bank import Record
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.plot.forest import Branch
from hplm.tenants.snapshot import LIVE, Snapshot, Tenant, read_tenant
from hplm.tenants.state import State

log = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 16
REST_SECONDS = 60.0  # before a record that was put down is written again: longer than a request may still need it
SETTINGS = ("keys", "rate", "burst", "in_flight", "deadline_us")  # of a tenant, whatever its version
PATIENCE = 60.0  # seconds a manager waits for another one
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS audit (generation INTEGER PRIMARY KEY, at TEXT, who TEXT, action TEXT, details TEXT);
CREATE TABLE IF NOT EXISTS before (tenant TEXT PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions (uid INTEGER PRIMARY KEY, last INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS resting (bank TEXT, record INTEGER, until REAL, PRIMARY KEY (bank, record));
"""


class Busy(HplmError):
    """Another manager is at work on the same state."""


@dataclass
class Change:
    """What will exist: a manager edits it, and it becomes the next generation."""

    generation: int
    tenants: dict[str, Tenant]
    branches: list[Branch]
    next_address: int
    next_uid: int
    before: dict[str, Tenant]  # of each tenant the version that it can go back to
    versions: dict[int, int]  # by uid: the last that was given
    resting: set[tuple[str, int]]  # records that a reader may still hold
    details: dict = field(default_factory=dict)  # for the audit log
    _taken: set[tuple[str, int]] = field(default_factory=set)  # records written by this change

    def put(self, tenant: Tenant) -> None:
        """A new tenant, or its next version; the one before stays known."""
        if tenant.id in self.tenants:
            self.before[tenant.id] = self.tenants[tenant.id]
        self.tenants[tenant.id] = tenant
        self.versions[tenant.uid] = max(tenant.version, self.versions.get(tenant.uid, 0))

    def replace(self, tenant: Tenant) -> None:
        """The same version with other settings."""
        self.tenants[tenant.id] = tenant

    def roll_back(self, tenant_id: str) -> Tenant:
        """Its version before takes over again, with today's keys and limits."""
        now, then = self.tenants[tenant_id], self.before.pop(tenant_id)
        settings = {name: getattr(now, name) for name in SETTINGS}
        self.tenants[tenant_id] = replace(then, **settings)
        return self.tenants[tenant_id]

    def remove(self, tenant_id: str) -> None:
        del self.tenants[tenant_id]
        self.forget(tenant_id)

    def forget(self, tenant_id: str) -> None:
        """It cannot be rolled back any more."""
        self.before.pop(tenant_id, None)

    def new_uid(self) -> int:
        """Never given twice: what a slot or a ticket says of a tenant that is gone is about nobody else."""
        self.next_uid += 1
        return self.next_uid - 1

    def next_version(self, tenant_id: str) -> int:
        """Never given twice either, not even after a rollback."""
        tenant = self.tenants.get(tenant_id)
        return max(self.versions.get(tenant.uid, 0), tenant.version) + 1 if tenant is not None else 1

    def records(self) -> set[tuple[str, int]]:
        known = (*self.tenants.values(), *self.before.values())
        return {(record.bank, record.index) for tenant in known for record in tenant.records()}

    def records_of(self, bank: str) -> set[int]:
        """Those that must not be written: in use, or put down too recently."""
        return {index for name, index in self.records() | self.resting | self._taken if name == bank}

    def take(self, record: Record) -> None:
        self._taken.add((record.bank, record.index))

    def add_branch(self, domain: str, version: int, size: int) -> Branch:
        """Addresses are never given twice: a ticket on its way may still speak of a table that is gone."""
        branch = Branch(domain, version, self.next_address)
        self.branches.append(branch)
        self.next_address += size
        return branch


class Registry:
    def __init__(self, state: State, exported: Snapshot, first_address: int, first_uid: int) -> None:
        """The first ones that the export has not given."""
        self.state = state
        self._exported = exported
        self._first = {"next address": first_address, "next uid": first_uid}
        self.decided = 0  # the generation that was decided last, here

    @contextmanager
    def change(self, action: str) -> Iterator[Change]:
        """What is done to the change within the block is published when it ends, and nothing if it raises."""
        with self._opened() as database:
            snapshot = self._newest(database)
            change = self._begin(database, snapshot)
            records = change.records()
            yield change
            self._write(database, action, change, records - change.records())
        self.decided = change.generation
        self.finish()

    def finish(self) -> None:
        """Publishes what is decided, and removes what nobody needs any more.

        The change is made, even if this fails: who waits for its readers tries again, and so does the next manager.
        """
        try:
            with self._opened() as database:
                self._sweep(self._newest(database), database)
        except (Busy, OSError) as error:
            log.warning("the change is made; what is left to do in %s, the next one does: %s", self.state.folder, error)

    def check_begun(self) -> None:
        """For who only reads: a folder that was named by mistake is not to become a state."""
        if not self.state.registry.exists():
            raise InvalidInput(
                f"{self.state.folder} holds no live state ({self.state.registry.name} is missing): nothing was changed there "
                "yet, or `hplm serve` has another --state"
            )

    def current(self) -> Snapshot:
        """What is published; finishes a change that was cut after it had been decided."""
        with self._opened() as database:
            return self._newest(database)

    @contextmanager
    def frozen(self) -> Iterator[tuple[Snapshot, sqlite3.Connection]]:
        """What is published, and the registry, while no manager changes them."""
        self.check_begun()
        with self._opened() as database:
            yield self._newest(database), database

    def audit(self) -> list[dict]:
        with self._opened() as database:
            rows = database.execute("SELECT generation, at, who, action, details FROM audit ORDER BY generation").fetchall()
        names = ("generation", "at", "who", "action")
        return [{**dict(zip(names, row[:4], strict=True)), **json.loads(row[4])} for row in rows]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other manager can come between."""
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
            raise Broken(f"{self.state.registry} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise Broken(f"{self.state.registry} is broken ({error}): restore the state; what is published goes on") from error
        finally:
            database.close()  # without COMMIT nothing has happened

    def _newest(self, database: sqlite3.Connection) -> Snapshot:
        decided = database.execute("SELECT max(generation) FROM audit").fetchone()[0] or 0
        published = self.state.current()
        if published < decided:
            self._publish(decided)
        elif published > decided:
            raise Broken(
                f"{self.state.folder} serves generation {published} and its registry knows {decided}: restore the state"
            )
        if not decided:
            return self._exported
        snapshot = self.state.load(decided)
        if snapshot.export != self._exported.export:
            raise Broken(f"{self.state.folder} belongs to another export: name its repository, or an empty --state")
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
        """The snapshot first, then the registry's own rows, which the transaction makes one decision of."""
        tenants = [change.tenants[name] for name in sorted(change.tenants)]
        snapshot = Snapshot(change.generation, change.branches, tenants, self._exported.export)
        snapshot.save(self.state.snapshots / str(change.generation))
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
        """Removes what no generation needs any more, or what a cut change left. Who reads it still has it open."""
        tables = {branch.folder for branch in snapshot.branches}
        for folder in self.state.tables.glob("*/*"):
            if f"{folder.parent.name}/{folder.name}" not in tables:
                shutil.rmtree(folder)
        self.state.sweep_aside()
        banks = needed_banks(snapshot, database)
        for file in self.state.banks.glob("*"):
            if LIVE + file.name not in banks:
                file.unlink()
        for file in self.state.readers.glob("*"):
            with suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > REST_SECONDS:
                    file.unlink()
        for file in self.state.snapshots.glob("*"):
            if not file.name.isdecimal() or int(file.name) <= snapshot.generation - KEPT_SNAPSHOTS:
                file.unlink()

    def _publish(self, generation: int) -> None:
        fresh = self.state.current_file.with_name("CURRENT.writing")
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(f"{generation}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.state.current_file)
        sync(self.state.folder)


def needed_banks(snapshot: Snapshot, database: sqlite3.Connection) -> set[str]:
    """By the name that records have: of tenants, and of what they can go back to."""
    before = [read_tenant(json.loads(entry)) for (entry,) in database.execute("SELECT entry FROM before")]
    return {record.bank for tenant in (*snapshot.tenants, *before) for record in tenant.records()}


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return f"uid {os.getuid()}"


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
