"""Brings a live state of the release before into a registry (`hplm begin --from`). For one release: then this file goes.

Such a state has numbered snapshots, weights in banks, and in `registry.sqlite` what only managers know.
"""

from __future__ import annotations

import filecmp
import json
import logging
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.adapters.records import Part, pack
from hplm.errors import MISFITS, Broken, InvalidInput
from hplm.plot.table import Branch, Table
from hplm.registry.store import CURRENT
from hplm.tenants.backup import MANIFEST
from hplm.tenants.change import AT_ONCE, Change
from hplm.tenants.exits import Exits
from hplm.tenants.manager import Manager
from hplm.tenants.registry import CHANGES
from hplm.tenants.snapshot import Tenant, checked
from hplm.tenants.state import EXPORTED_TABLES, EXPORTED_TENANTS, EXPORTED_UPPER

log = logging.getLogger(__name__)

FORMATS = range(2, 10)  # of snapshots
IMPORT = "import"  # the action of the first generation
NO_LONGER_SERVED = ("levels", "ladder", "link")  # of a tenant
BANKS, LIVE = "adapters", "state/"  # `LIVE` begins the names of banks in the state
PAGE, HEADER, HEADER_BYTES = 4096, struct.Struct("<QII"), 64  # of a bank; a record's uid, version and checksum
WAY_OUT = "mend it with the version of hplm that wrote it, for example with `hplm restore` or `hplm tenant update`"
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name, value);
CREATE TABLE IF NOT EXISTS audit (generation, at, who, action, details);
CREATE TABLE IF NOT EXISTS before (tenant, entry);
CREATE TABLE IF NOT EXISTS versions (uid, last);
"""


def import_state(manager: Manager, source: Path, repository: Path, lease_s: float) -> bool:
    """Makes a registry that serves what a state served, unless there is one. Returns whether it was made now.

    `source`: the state, or a backup of it. `repository`: the export that it was served with. After an interruption the same
    call makes it anew, also where a snapshot was written and CURRENT was not.
    """
    backbone = manager.folder.parent.name
    folder = source if (source / MANIFEST).exists() else source / backbone
    old = _Import(manager, folder, repository / backbone / "1")
    left = manager.registry.newest_left()
    was_cut = left.ledger.change.get("action") == IMPORT  # no later change was made
    return manager.registry.begin_with(IMPORT, old.edit, lease_s, left if was_cut else None)


class _Import:
    def __init__(self, manager: Manager, folder: Path, exported: Path) -> None:
        self._manager = manager
        self._folder = folder
        self._exported = exported
        self._layout = cache(_layout)
        self._here = {tenant.id: _records(tenant) for tenant in manager.exported.tenants}

    def edit(self, change: Change) -> None:
        exported = _read(self._exported / EXPORTED_TENANTS)
        self._check()
        audit, before, last, facts = self._rows()
        generation = audit[-1]["generation"] if audit else 0
        served = self._snapshot(generation, exported)
        uids = [entry["uid"] for entry in served["tenants"]]
        change.generation = max(change.generation, generation + 1)
        change.tenants = {entry["id"]: self._tenant(change, entry) for entry in served["tenants"]}
        change.before = {entry["id"]: self._tenant(change, entry) for entry in before}
        used = {tenant.id: last.get(tenant.uid, 0) for tenant in change.tenants.values()}
        change.last_versions = {name: version for name, version in used.items() if version > change.tenants[name].version}
        change.next_uid = max([facts.get("next uid", 1), *(uid + 1 for uid in uids)])
        change.branches = sorted(self._branches(change, served["tables"]), key=lambda branch: branch.base)
        left_out = sorted({tenant.id for tenant in self._manager.exported.tenants} - set(change.tenants))
        if left_out:
            named = ", ".join(left_out[:5])
            log.warning("%d exported tenants are not served, as in %s: %s ...", len(left_out), self._folder, named)
        change.details = {"from": str(self._folder), "from_generation": generation, "left_out": left_out}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._tell, audit))

    def _tell(self, change: dict[str, Any]) -> None:
        """Writes down who made an earlier generation."""
        self._manager.registry.store.put(f"{CHANGES}/{change['generation']}", msgspec.json.encode(change))

    def _check(self) -> None:
        """Raises if this is no state of the release before, or if it does not fit the export."""
        if (self._folder / "FOLLOWED").exists():
            raise InvalidInput(f"{self._folder} is a copy of another state: bring that one over")
        try:
            is_old = (self._folder / CURRENT).read_bytes().strip().isdigit()
        except FileNotFoundError:
            raise InvalidInput(f"{self._folder} has no {CURRENT}, so it is no live state: name another one") from None
        if not is_old:
            raise InvalidInput(f"{self._folder} is not of the release before: `hplm backup` and `hplm restore` move it")
        new = self._manager.folder
        if not filecmp.cmp(self._exported / EXPORTED_UPPER, new / EXPORTED_UPPER, shallow=False):
            raise InvalidInput(f"{new} was exported from another store than {self._exported}: export the same store")

    def _rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[int, int], dict[str, int]]:
        """Returns the changes, the versions before, the last version of each uid, and the next numbers."""
        path = self._folder / "registry.sqlite"
        try:
            with TemporaryDirectory() as aside:  # with the journal that a killed manager may have left
                for file in self._folder.glob(f"{path.name}*"):
                    shutil.copy(file, aside)
                with closing(sqlite3.connect(Path(aside) / path.name)) as database:
                    database.executescript(SCHEMA)
                    rows = database.execute("SELECT generation, at, who, action, details FROM audit ORDER BY generation")
                    names = ("generation", "at", "who", "action")
                    audit = [{**dict(zip(names, row[:4], strict=True)), **json.loads(row[4])} for row in rows]
                    before = [json.loads(entry) for (entry,) in database.execute("SELECT entry FROM before")]
                    last = dict(database.execute("SELECT uid, last FROM versions"))
                    return audit, before, last, dict(database.execute("SELECT name, value FROM facts"))
        except (sqlite3.DatabaseError, ValueError) as error:
            raise Broken(f"{path} is broken ({error}): {WAY_OUT}") from None

    def _snapshot(self, generation: int, exported: dict[str, Any]) -> dict[str, Any]:
        published = int((self._folder / CURRENT).read_bytes())
        if published > generation:
            raise Broken(f"{self._folder} has generation {published}, but its registry ends with {generation}: {WAY_OUT}")
        if not generation:
            return exported
        served = _read(self._folder / "snapshots" / str(generation))
        if served["export"] != exported["export"]:
            raise InvalidInput(f"{self._folder} belongs to another export than {self._exported}: name its --from-repository")
        return served

    def _tenant(self, change: Change, entry: dict[str, Any]) -> Tenant:
        """Returns a tenant or a version before. Its weights are in the export, or get into the registry."""
        name = f"tenant {entry.get('id')!r} of {self._folder}"
        if gone := [field for field in NO_LONGER_SERVED if entry.get(field)]:
            log.warning("%s is served without its %s: its full stack answers", name, ", ".join(gone))
        try:
            tenant = msgspec.convert({**entry, "head": None, "adapter": None, "exits": None}, Tenant)
            exits = entry.get("exits")
            banked = {"head": entry["head"], "adapter": entry["adapter"], "exits": exits and exits["record"]}
            parts = {part: self._part(record) for part, record in banked.items() if record is not None}
            packed = pack(parts)
            here = self._here.get(tenant.id, {})
            if _contents(here) == _contents(packed.records):
                records: Mapping[str, Record] = here
            else:
                records = change.kept.of((tenant.id, tenant.version), lambda: packed)
            own = replace(Exits.read({**exits, "record": None}), record=records["exits"]) if exits is not None else None
            return checked(replace(tenant, head=records.get("head"), adapter=records.get("adapter"), exits=own))
        except MISFITS as error:
            raise Broken(f"{name} cannot be read ({error}): {WAY_OUT}") from None

    def _part(self, record: dict[str, Any]) -> Part:
        """Reads a record of a bank, and checks that it is whole and the tenant's."""
        bank, index = record["bank"], record["index"]
        path = (self._folder if bank.startswith(LIVE) else self._exported) / BANKS / bank.removeprefix(LIVE)
        layout = self._layout(path)
        size = HEADER_BYTES + layout.weight_bytes
        with open(path, "rb") as file:
            file.seek(PAGE + index * -(-size // HEADER_BYTES) * HEADER_BYTES)
            content = bytearray(file.read(size))
        if len(content) < size or HEADER.unpack_from(content)[:2] != (record["uid"], record["version"]):
            raise Broken(f"record {index} of {path} belongs to another tenant or version: {WAY_OUT}")
        if zlib.crc32(weights := content[HEADER_BYTES:]) != HEADER.unpack_from(content)[2]:
            raise Broken(f"record {index} of {path} is corrupt (checksum): {WAY_OUT}")
        flat = torch.frombuffer(weights, dtype=layout.torch_dtype).view(layout.layers, layout.layer_size)
        return layout, layout.unpack(flat)

    def _branches(self, change: Change, tables: list[dict[str, Any]]) -> Iterator[Branch]:
        """Yields the tables that were served: those of the export, and those that get into the registry now."""
        exported = {branch.place: branch for branch in self._manager.exported.branches}
        for entry in tables:
            place = entry["domain"], entry["version"]
            where = Path(EXPORTED_TABLES, place[0], str(place[1]))
            own = self._folder / where
            table = Table(own if own.is_dir() else self._exported / where)
            branch = exported.get(place)
            if branch is None:
                branch = change.add_branch(*place, change.kept.table(table), table.size)
            elif not self._manager.tables.is_same(branch, table):
                raise InvalidInput(
                    f"{self._manager.folder} has another version {place[1]} of domain {place[0]!r} than {table.folder}: "
                    "export the store that this state was served from"
                )
            yield branch


def _read(path: Path) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        found = stored["format"], stored["export"], stored["tenants"], stored["tables"]
    except FileNotFoundError:
        raise InvalidInput(f"{path} is missing: --from and --from-repository name a state and its export") from None
    except MISFITS as error:
        raise Broken(f"{path} does not describe tenants and tables ({error}): {WAY_OUT}") from None
    if found[0] not in FORMATS:
        raise InvalidInput(f"{path} has format {found[0]!r}, which is not of the release before: name its --from-repository")
    return stored


def _records(tenant: Tenant) -> dict[str, Record]:
    """Returns the records of a tenant by the names of their parts."""
    records = {"head": tenant.head, "adapter": tenant.adapter, "exits": tenant.exits and tenant.exits.record}
    return {part: record for part, record in records.items() if record is not None}


def _contents(records: Mapping[str, Record]) -> dict[str, tuple[str, int]]:
    return {part: (record.layout, record.checksum) for part, record in records.items()}


def _layout(bank: Path) -> Layout:
    """Returns the layout that the first page of a bank describes."""
    try:
        with open(bank, "rb") as file:
            stored = json.loads(file.read(PAGE).rstrip(b"\0"))
        return Layout(**(stored["layout"] | {"places": tuple(stored["layout"]["places"])}))
    except FileNotFoundError:
        raise Broken(f"{bank} is missing: name the export that the state was served with, with --from-repository") from None
    except MISFITS as error:
        raise Broken(f"{bank} has no readable header ({error}): {WAY_OUT}") from None
