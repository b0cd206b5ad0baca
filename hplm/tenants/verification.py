"""Verifies a repository and its live state against their checksums, and names everything that is broken."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hplm.adapters.bank import WAY_OUT as EXPORT_AGAIN
from hplm.adapters.bank import Bank
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.model.weights import load_weights
from hplm.plot.table import Table
from hplm.tenants.banks import WAY_OUT as RESTORE
from hplm.tenants.banks import open_bank
from hplm.tenants.snapshot import LIVE, Snapshot
from hplm.tenants.state import (
    EXPORTED_BANKS,
    EXPORTED_CONFIG,
    EXPORTED_TABLES,
    EXPORTED_TENANTS,
    EXPORTED_TOKENIZER,
    EXPORTED_UPPER,
    State,
)

WHOLE_MODELS = "whole.json"  # a file that only exports of `research.schemes` have
PUBLISHING_SECONDS = 0.5  # the time between deciding and publishing a change
NAMED = 5  # how many broken rows of a table, or records of a bank, are listed

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Part:
    """A file or folder to check. `check` yields its errors, and reports how many bytes it has read."""

    kind: str
    path: Path
    check: Callable[[Path, Progress], Iterator[str]]

    @property
    def size(self) -> int:
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


def repository_parts(repository: Path, state: Path | None) -> list[Part]:
    folders = [path.parent for path in sorted(repository.glob(f"*/1/{EXPORTED_CONFIG}"))]
    folders = [folder for folder in folders if folder.parent.suffix != ".writing"]
    if not folders:
        raise InvalidInput(f"{repository} contains no backbone: name the folder that `hplm export` wrote")
    for folder in folders:
        if (folder / WHOLE_MODELS).exists():
            raise InvalidInput(
                f"{folder.parent} has a whole model for each tenant, without checksums: export it again if you doubt its files"
            )
    parts: list[Part] = []
    states = {folder: State(state / folder.parent.name) for folder in folders if state is not None}
    if state is not None and not any(_is_begun(live) for live in states.values()):
        places = ", ".join(str(live.folder) for live in states.values()) or state
        raise InvalidInput(
            f"{state} contains no live state: neither registry.sqlite nor CURRENT is in {places}. Name the folder of "
            "`hplm serve --state`, or leave --state out if nothing was changed yet"
        )
    for folder in folders:
        live = states.get(folder)
        places = [(folder / EXPORTED_TABLES, folder / EXPORTED_BANKS, EXPORT_AGAIN)]
        places += [(live.tables, live.banks, RESTORE)] if live else []
        for tables, banks, way_out in places:
            parts += [Part("table", table, check_table) for table in versions(tables) if (table / "meta.json").exists()]
            parts += [Part("bank", bank, partial(check_bank, way_out=way_out)) for bank in sorted(banks.glob("*.bank"))]
        files = [folder / name for name in (EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_UPPER)]
        parts += [Part("file", file, check_file) for file in files]
        snapshots = [folder / EXPORTED_TENANTS]
        if live is not None and _is_begun(live):
            if not live.followed.exists():  # a copy has no registry
                parts.append(Part("registry", live.registry, _check_registry(live)))
            with suppress(Broken):  # the registry's check reports it
                if newest := live.current():  # older snapshots may name files that were removed
                    snapshots.append(live.snapshots / str(newest))
        parts += [Part("snapshot", snapshot, _check_snapshot(folder, live)) for snapshot in snapshots]
    return parts


def _is_begun(live: State) -> bool:
    return live.registry.exists() or live.current_file.exists()


def versions(folder: Path) -> list[Path]:
    """Returns all versions of all domains or tenants in a folder. A folder whose name is a number is complete."""
    found = [path for path in folder.glob("*/*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: (path.parent.name, int(path.name)))


def check_table(folder: Path, progress: Progress) -> Iterator[str]:
    try:
        table = Table(folder)
    except (HplmError, OSError, KeyError, TypeError) as error:
        yield f"table {folder}: {error}"
        return
    try:
        _ = table.index  # checked completely when it is opened
        progress(sum(table.meta.index.sizes().values()))
    except HplmError as error:
        yield f"table {folder}: {error}"
    if wrong := list(table.rows.broken(progress)):
        yield f"table {folder}: checksum mismatch in {_named('row', wrong)} of values: build or copy the table again"


def check_bank(path: Path, progress: Progress, way_out: str = EXPORT_AGAIN) -> Iterator[str]:
    try:
        bank = Bank(path, way_out)
    except (HplmError, OSError, KeyError, TypeError) as error:
        yield f"bank {path}: {error}"
        return
    if wrong := list(bank.broken(progress)):
        yield f"bank {path}: checksum mismatch in {_named('record', wrong)}: {way_out}"


def check_file(path: Path, progress: Progress) -> Iterator[str]:
    """Checks weights against their checksum. Other files have no checksum, so they are only read."""
    from tokenizers import Tokenizer

    try:
        if path.name == "tokenizer.json":
            Tokenizer.from_str(path.read_text("utf-8"))
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        else:
            progress(sum(tensor.nbytes for tensor in load_weights(path).values()))
    except Broken as error:
        yield f"file {error}"
    except Exception as error:  # the tokenizer library raises no narrower type
        yield f"cannot read file {path}: {error}"


def _check_registry(live: State) -> Callable[[Path, Progress], Iterator[str]]:
    def check(path: Path, progress: Progress) -> Iterator[str]:
        try:
            before = live.current()
            decided = _decided(path)
            if decided > live.current():
                time.sleep(PUBLISHING_SECONDS)
            after = live.current()
        except Broken as error:
            yield f"registry {path}: {error}"
            return
        if decided > after:
            yield (
                f"registry {path} ends with generation {decided}, but {live.current_file} publishes {after}: make a change "
                "with `hplm tenant` or `hplm domain`, which publishes the newest, or restore the state"
            )
        elif decided < before:
            yield (
                f"registry {path} ends with generation {decided}, but {live.current_file} publishes {before}: restore the state"
            )

    return check


def _decided(registry: Path) -> int:
    """Returns the newest generation of a registry, or 0 if its first change has failed. Raises Broken if it is damaged."""
    try:
        with closing(sqlite3.connect(f"{registry.resolve().as_uri()}?mode=ro", uri=True)) as database:
            found = [row[0] for row in database.execute("PRAGMA integrity_check")]
            if found == ["ok"]:
                if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'audit'").fetchone() is None:
                    return 0
                return database.execute("SELECT max(generation) FROM audit").fetchone()[0] or 0
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    raise Broken(f"{'; '.join(found)}: restore the state. Published tenants are still served")


def _check_snapshot(folder: Path, live: State | None) -> Callable[[Path, Progress], Iterator[str]]:
    """Checks that the tables and banks of a snapshot exist, and that its records belong to its tenants."""

    def check(path: Path, progress: Progress) -> Iterator[str]:
        try:
            snapshot = Snapshot.load(path)
        except (HplmError, OSError, KeyError, TypeError) as error:
            yield f"snapshot {path}: {error}"
            return
        roots = [folder / EXPORTED_TABLES] + ([live.tables] if live else [])
        for branch in snapshot.branches:
            if not any((root / branch.folder / "meta.json").exists() for root in roots):
                yield f"snapshot {path}: table {branch.folder} is missing in {', '.join(map(str, roots))}"
        banks: dict[str, Bank | None] = {}
        for name in snapshot.banks():
            try:
                banks[name] = open_bank(live, name) if live and name.startswith(LIVE) else Bank(folder / EXPORTED_BANKS / name)
            except (HplmError, OSError, KeyError, TypeError) as error:
                banks[name] = None
                yield f"snapshot {path}: {error}"
        for tenant in snapshot.tenants:
            for record in tenant.records():
                if (bank := banks[record.bank]) is None:
                    continue
                if not 0 <= record.index < bank.records:
                    yield f"tenant {tenant.id}: bank {record.bank} has no record {record.index}"
                    continue
                if bank.owner(record.index) != (record.uid, record.version):
                    yield f"tenant {tenant.id}: record {record.index} of bank {record.bank} has another tenant or version"

    return check


def _named(kind: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:NAMED])) + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")
    return f"{kind}{'s' if len(numbers) > 1 else ''} {shown}"
