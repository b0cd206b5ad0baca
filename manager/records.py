"""The manager's records: owners, keys, files, jobs, their events, and who did what. All SQL is here.

A row that was written is on the disk when its function returns. Each function can be called from any thread.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from hplm.errors import InvalidInput

FORMAT = 1
DAY = 86400.0
WAITING = ("validating_files", "queued", "running")  # the statuses of jobs that have not ended, in their order
ROLES = ("ask", "manage", "operator")
TRAINING, IMPORT, DOMAIN = ("training", "import", "domain")  # of jobs
OPERATORS = "operators"  # the owner for whom operators act who name none
SCHEMA = """
CREATE TABLE owners (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, limits TEXT NOT NULL);
CREATE TABLE keys (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT REFERENCES owners(id), role TEXT NOT NULL,
    digest TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL, revoked INTEGER NOT NULL
);
CREATE TABLE files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL REFERENCES owners(id), name TEXT NOT NULL,
    purpose TEXT NOT NULL, ending TEXT NOT NULL, bytes INTEGER NOT NULL, digest TEXT NOT NULL, created INTEGER NOT NULL,
    expires INTEGER NOT NULL
);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL REFERENCES owners(id), created INTEGER NOT NULL,
    tenant TEXT NOT NULL, backbone TEXT NOT NULL, domain TEXT, training_file TEXT NOT NULL, validation_file TEXT,
    wishes TEXT NOT NULL, status TEXT NOT NULL, step TEXT NOT NULL, task TEXT, version_before INTEGER, version INTEGER,
    served_as TEXT, error TEXT, started INTEGER, finished INTEGER, seconds REAL NOT NULL, tries INTEGER NOT NULL,
    exams INTEGER NOT NULL, again REAL NOT NULL, cancelled INTEGER NOT NULL
);
CREATE INDEX jobs_of_owners ON jobs(owner, status);
CREATE TABLE events (
    number INTEGER PRIMARY KEY, job TEXT NOT NULL REFERENCES jobs(id), mark TEXT NOT NULL, at INTEGER NOT NULL,
    level TEXT NOT NULL, message TEXT NOT NULL, data TEXT, UNIQUE(job, mark)
);
CREATE TABLE audit (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, who TEXT NOT NULL, owner TEXT, action TEXT NOT NULL, details TEXT NOT NULL
);
"""
JSON = {"limits", "wishes", "error", "data", "details"}  # columns

HAS_FILE = "(? IN (training_file, validation_file) OR ? IN (SELECT value FROM json_each(wishes, '$.import')))"  # of a job


@dataclass(frozen=True)
class Owner:
    id: str  # its name
    created: int
    limits: dict[str, int]  # those that differ from the usual ones


@dataclass(frozen=True)
class Key:
    id: str
    owner: str | None  # None: of operators
    role: str
    digest: str  # of its secret
    created: int
    expires: int  # 0: never
    revoked: int  # when; 0: it is valid


@dataclass(frozen=True)
class File:
    id: str
    owner: str
    name: str  # as the client calls it; never a path here
    purpose: str
    ending: str  # that names its format here
    bytes: int
    digest: str
    created: int
    expires: int  # 0: never


@dataclass(frozen=True)
class Job:
    id: str
    owner: str
    created: int
    tenant: str  # that it makes; of a domain's job BACKBONE/DOMAIN
    backbone: str
    domain: str | None
    training_file: str
    validation_file: str | None
    wishes: dict[str, Any]  # the other fields of the request
    status: str = WAITING[0]
    step: str = ""  # the command that runs: check, build or publish
    task: str | None = None
    version_before: int | None = None  # the newest in the store when the build began
    version: int | None = None  # that it has made
    served_as: str | None = None  # the tenant under which the version is served
    error: dict[str, Any] | None = None
    started: int | None = None
    finished: int | None = None
    seconds: float = 0.0  # of processors
    tries: int = 0  # deaths of the step by a signal
    exams: int = 0  # when it died last
    again: float = 0.0  # when it may be taken again
    cancelled: int = 0  # when it was asked to end

    @property
    def kind(self) -> str:
        return DOMAIN if "/" in self.tenant else IMPORT if self.wishes["import"] else TRAINING

    @property
    def ended(self) -> bool:
        return self.status not in WAITING


@dataclass(frozen=True)
class Event:
    number: int
    job: str
    mark: str  # names the event in its job, so that it is written once
    at: int
    level: str
    message: str
    data: dict[str, Any] | None


@dataclass(frozen=True)
class Deed:
    number: int
    at: float
    who: str  # the id of a key, or "command line"
    owner: str | None
    action: str
    details: dict[str, Any]


TABLES: dict[type, str] = {Owner: "owners", Key: "keys", File: "files", Job: "jobs", Event: "events", Deed: "audit"}
Row = TypeVar("Row", Owner, Key, File, Job, Event, Deed)


class Records:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.copy = path.with_suffix(".copy")
        self._lock = threading.RLock()  # one thread at a time uses the connection
        self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
        path.chmod(0o600)
        self._base.row_factory = sqlite3.Row
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            self._base.execute(f"PRAGMA {setting}")
        with self.together():
            (found,) = self._base.execute("PRAGMA user_version").fetchone()
            if found == 0:
                for statement in SCHEMA.split(";\n"):
                    self._base.execute(statement)
                self._base.execute(f"PRAGMA user_version={FORMAT}")
            if found in (0, FORMAT):
                self._base.execute(f"INSERT OR IGNORE INTO owners (id, created, limits) VALUES ('{OPERATORS}', 0, '{{}}')")
        if found not in (0, FORMAT):
            raise InvalidInput(f"{path} has format {found}, and this version of hplm reads {FORMAT}: use the one that wrote it")

    def close(self) -> None:
        with self._lock:
            self._base.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Makes all changes of a block, or none if it raises. No other writer comes between."""
        with self._lock:
            if self._base.in_transaction:  # of this thread: the block around ends it
                yield
                return
            self._base.execute("BEGIN IMMEDIATE")
            with self._base:
                yield

    def back_up(self, now: float) -> None:
        """Writes a copy that can be copied at any time, unless there is one of the last day."""
        if self.copy.exists() and now - self.copy.stat().st_mtime < DAY:
            return
        (new := self.copy.with_suffix(".new")).unlink(missing_ok=True)
        with self._lock:
            self._base.execute("VACUUM INTO ?", (str(new),))
        new.chmod(0o600)
        new.replace(self.copy)

    def add(self, row: Owner | Key | File | Job) -> None:
        columns = asdict(row)
        marks = ", ".join("?" * len(columns))
        values = [_stored(*one) for one in columns.items()]
        self._do(f"INSERT INTO {TABLES[type(row)]} ({', '.join(columns)}) VALUES ({marks})", *values)

    def get(self, kind: type[Row], id: str) -> Row | None:
        return next(iter(self._all(kind, "id = ?", id)), None)

    def change(self, kind: type[Row], id: str, **changed: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in changed)
        self._do(f"UPDATE {TABLES[kind]} SET {names} WHERE id = ?", *(_stored(*one) for one in changed.items()), id)

    def remove(self, kind: type[Row], id: str) -> None:
        self._do(f"DELETE FROM {TABLES[kind]} WHERE id = ?", id)

    def owners(self) -> list[Owner]:
        return self._all(Owner, "1 ORDER BY id")

    def key_of(self, digest: str) -> Key | None:
        return next(iter(self._all(Key, "digest = ?", digest)), None)

    def keys(self, owner: str | None) -> list[Key]:
        """Returns an owner's keys, also those that were revoked; None: the operators'."""
        return self._all(Key, "owner IS ? ORDER BY number", owner)

    def files(self) -> list[File]:
        return self._all(File, "1")

    def bytes_of(self, owner: str) -> int:
        return self._number("SELECT sum(bytes) FROM files WHERE owner = ?", owner)

    def needs(self, file: str) -> bool:
        """Whether a job that has not ended needs a file."""
        sql = f"SELECT count(*) FROM jobs WHERE status IN {WAITING} AND {HAS_FILE}"
        return self._number(sql, file, file) > 0

    def last_needed(self, file: str) -> int:
        """Returns when the last job with a file ended; 0: none has."""
        return self._number(f"SELECT max(finished) FROM jobs WHERE {HAS_FILE}", file, file)

    def jobs_of(self, tenant: str) -> list[Job]:
        """Returns a tenant's jobs, the newest first."""
        return self._all(Job, "tenant = ? ORDER BY number DESC", tenant)

    def unended(self, owner: str | None = None) -> list[Job]:
        """Returns the jobs that have not ended, the oldest first. `owner` None: of all."""
        return self._all(Job, f"status IN {WAITING} AND owner = coalesce(?, owner) ORDER BY number", owner)

    def jobs_since(self, owner: str, then: float) -> int:
        return self._number("SELECT count(*) FROM jobs WHERE owner = ? AND created > ?", owner, then)

    def seconds_since(self, owner: str, then: float) -> float:
        """Returns the processor time of an owner's jobs that have ended since, or have not."""
        sql = "SELECT sum(seconds) FROM jobs WHERE owner = ? AND coalesce(finished, ?) >= ?"
        return self._number(sql, owner, then, then)

    def take(self, status: str, step: str, now: float) -> Job | None:
        """Takes the next job that waits with a status, for the step; None: none waits. No two jobs of a tenant run at a time.

        First come owners without a running job, of them the one whose jobs have taken the least processor time in 24 hours.
        """
        sql = """status = ?1 AND step = '' AND again <= ?2
            AND tenant NOT IN (SELECT tenant FROM jobs WHERE status = 'running' AND ?1 != 'validating_files')
            ORDER BY (SELECT count(*) FROM jobs AS own WHERE own.owner = jobs.owner AND own.step != ''),
            (SELECT total(own.seconds) FROM jobs AS own WHERE own.owner = jobs.owner
            AND coalesce(own.finished, ?2) > ?3), number LIMIT 1"""
        with self.together():
            job = next(iter(self._all(Job, sql, status, now, now - DAY)), None)
            if job is None:
                return None
            taken = {"status": WAITING[0] if status == WAITING[0] else WAITING[2], "step": step}
            self.change(Job, job.id, **taken, started=job.started or int(now))
            return self.get(Job, job.id)

    def put_back(self) -> None:
        """Lets all jobs wait that were taken by a process that has ended."""
        with self.together():
            self._do("UPDATE jobs SET step = '' WHERE status = 'validating_files'")
            self._do("UPDATE jobs SET step = '', status = 'queued' WHERE status = 'running'")

    def tell(self, job: str, mark: str, message: str, level: str = "info", **data: Any) -> None:
        """Adds an event, unless the job has one of this mark."""
        sql = "INSERT OR IGNORE INTO events (job, mark, at, level, message, data) VALUES (?, ?, ?, ?, ?, ?)"
        self._do(sql, job, mark, int(time.time()), level, message, json.dumps(data) if data else None)

    def events(self, job: str, after: int = 0) -> list[Event]:
        return self._all(Event, "job = ? AND number > ? ORDER BY number", job, after)

    def page(
        self, kind: type[Row], owner: str, after: str | None, limit: int, newest_first: bool, **where: Any
    ) -> tuple[list[Row], bool] | None:
        """Returns rows of an owner behind the one with the id `after`, and whether there are more; None: it has no such."""
        first, sign = None, "<" if newest_first else ">"
        if after is not None:
            first = self._number(f"SELECT number FROM {TABLES[kind]} WHERE id = ? AND owner = ?", after, owner) or None
            if first is None:
                return None
        named = "".join(f" AND {name} = ?" for name in where)
        order = "DESC" if newest_first else "ASC"
        sql = f"owner = ? AND (? IS NULL OR number {sign} ?){named} ORDER BY number {order} LIMIT ?"
        rows = self._all(kind, sql, owner, first, first, *where.values(), limit + 1)
        return rows[:limit], len(rows) > limit

    def note(self, who: str, owner: str | None, action: str, **details: Any) -> None:
        """Writes down who did what."""
        sql = "INSERT INTO audit (at, who, owner, action, details) VALUES (?, ?, ?, ?, ?)"
        self._do(sql, time.time(), who, owner, action, json.dumps(details))

    def deeds(self, before: int | None = None, limit: int = 100) -> list[Deed]:
        """Returns what was done, the newest first."""
        return self._all(Deed, "? IS NULL OR number < ? ORDER BY number DESC LIMIT ?", before, before, limit)

    def _do(self, sql: str, *values: Any) -> None:
        with self.together():
            self._base.execute(sql, values)

    def _number(self, sql: str, *values: Any) -> Any:
        with self._lock:
            found = self._base.execute(sql, values).fetchone()
            return found[0] or 0 if found else 0

    def _all(self, kind: type[Row], where: str, *values: Any) -> list[Row]:
        names = [field.name for field in fields(kind)]
        with self._lock:
            found = self._base.execute(f"SELECT {', '.join(names)} FROM {TABLES[kind]} WHERE {where}", values).fetchall()
        return [kind(*map(_read, names, row)) for row in found]


def _stored(name: str, value: Any) -> Any:
    return json.dumps(value) if name in JSON and value is not None else value


def _read(name: str, value: Any) -> Any:
    return json.loads(value) if name in JSON and value is not None else value
