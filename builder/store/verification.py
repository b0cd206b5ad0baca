"""Everything that is stored, against its checksums: whatever is broken is named, all of it."""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from builder.store.store import Store, TenantFile
from builder.tables.counts import Counts
from hplm.adapters.bank import HEADER, HEADER_BYTES, PAGE, Bank, record_bytes
from hplm.adapters.bank import WAY_OUT as EXPORT_AGAIN
from hplm.engine.backbone import Backbone
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.model.weights import load_weights
from hplm.plot.table import Table, TableMeta
from hplm.tenants.snapshot import LIVE, Snapshot
from hplm.tenants.state import WAY_OUT as RESTORE
from hplm.tenants.state import State
from research.baselines.models import WholeConfig

ROWS = 4096  # of a table that are read at once
PUBLISHING_SECONDS = 0.5  # a change is decided a moment before it is published
TENANT = "tenant.json"
NAMED = 5  # broken rows of a table, or records of a bank, that are named one by one

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Part:
    """One thing that is whole or broken. `check` says what is wrong with it, and tells how many bytes it has read."""

    kind: str
    path: Path
    check: Callable[[Path, Progress], Iterator[str]]

    @property
    def size(self) -> int:
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


def store_parts(folder: Path) -> list[Part]:
    store = Store(folder)
    files = [folder / "tokenizer.json", folder / "upper.safetensors", *sorted(folder.glob("lower/*.safetensors"))]
    files += [path for path in sorted(folder.glob("tenants/*/*/*.*")) if path.suffix in (".json", ".safetensors")]
    files = [file for file in files if file.name != TENANT and not _is_unfinished(file, folder)]
    tables = [Part("table", table, _check_branch(folder)) for table in _versions(folder / "plot")]
    counts = [Part("counts", meta.parent, check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    return tables + counts + [Part("file", file, check_file) for file in files] + _tenant_parts(store)


def _is_unfinished(file: Path, store: Path) -> bool:
    place = file.relative_to(store).parts
    return file.suffix == ".writing" or (place[0] == "tenants" and not place[2].isdecimal())


def _versions(folder: Path) -> list[Path]:
    """Of every domain's tables, or of every tenant; what has such a name is complete."""
    found = [path for path in folder.glob("*/*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: (path.parent.name, int(path.name)))


def _tenant_parts(store: Store) -> list[Part]:
    """Only the newest version of a tenant keeps its table from being swept."""
    folders = _versions(store.folder / "tenants")
    newest = set({folder.parent: folder for folder in folders}.values())
    return [Part("tenant", folder / TENANT, _check_tenant(store.folder, folder in newest)) for folder in folders]


def repository_parts(repository: Path, state: Path | None) -> list[Part]:
    folders = [path.parent for path in sorted(repository.glob(f"*/1/{Backbone.CONFIG}"))]
    folders = [folder for folder in folders if folder.parent.suffix != ".writing"]
    if not folders:
        raise InvalidInput(f"{repository} holds no backbone: name the folder that `hplm export` wrote")
    whole = [folder for folder in folders if (folder / WholeConfig.FILE).exists()]
    backbones = [folder for folder in folders if not (folder / WholeConfig.FILE).exists()]
    states = {folder: State(state / folder.parent.name) for folder in backbones if state is not None}
    if state is not None and not any(_is_begun(live) for live in states.values()):
        places = ", ".join(str(live.folder) for live in states.values()) or state
        raise InvalidInput(
            f"{state} holds no live state: neither registry.sqlite nor CURRENT is in {places}. Name the folder that "
            "`hplm serve --state` was given, or leave --state out where nothing was changed yet"
        )
    parts = _whole_parts(whole)
    for folder in backbones:
        live = states.get(folder)
        places = [(folder / Backbone.TABLES, folder / Backbone.BANKS, EXPORT_AGAIN)]
        places += [(live.tables, live.banks, RESTORE)] if live else []
        for tables, banks, way_out in places:
            parts += [Part("table", table, check_table) for table in _versions(tables) if (table / "meta.json").exists()]
            parts += [Part("bank", bank, partial(check_bank, way_out=way_out)) for bank in sorted(banks.glob("*.bank"))]
        files = [folder / name for name in (Backbone.CONFIG, Backbone.TOKENIZER, Backbone.UPPER)]
        parts += [Part("file", file, check_file) for file in files]
        snapshots = [folder / Backbone.TENANTS]
        if live is not None and _is_begun(live):
            parts.append(Part("registry", live.registry, _check_registry(live)))
            with suppress(Broken):  # the registry's check names it
                if newest := live.current():  # those before it may name what is gone by now
                    snapshots.append(live.snapshots / str(newest))
        parts += [Part("snapshot", snapshot, _promises(folder, live)) for snapshot in snapshots]
    return parts


def _is_begun(live: State) -> bool:
    return live.registry.exists() or live.current_file.exists()


def _whole_parts(folders: list[Path]) -> list[Part]:
    """Of baselines, whose bodies are often hard links to one file, which is read once."""
    parts: list[Part] = []
    bodies: dict[tuple[int, int], Path] = {}
    for folder in folders:
        parts += [Part("table", table, check_table) for table in _versions(folder / "plot")]
        parts += [Part("file", folder / name, check_file) for name in (Backbone.CONFIG, Backbone.TOKENIZER)]
        parts.append(Part("file", folder / WholeConfig.FILE, check_whole))
        parts += [Part("file", head, check_file) for head in sorted(folder.glob("heads/*"))]
        bodies |= {(body.stat().st_dev, body.stat().st_ino): body for body in sorted(folder.glob("bodies/*"))}
    return parts + [Part("file", body, check_file) for body in bodies.values()]


def check_whole(path: Path, progress: Progress) -> Iterator[str]:
    """Whether what it names is there."""
    try:
        whole = WholeConfig.load(path.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"file {path} cannot be read: {error}"
        return
    names = [f"{kind}/{tenant.weights}.safetensors" for tenant in whole.tenants for kind in ("bodies", "heads")]
    for name in [*names, *(f"plot/{branch.folder}" for branch in whole.tables)]:
        if not (path.parent / name).exists():
            yield f"file {path.parent / name} is missing: export the scheme again"


def _check_tenant(store: Path, stands: bool) -> Callable[[Path, Progress], Iterator[str]]:
    """Whether what a tenant needs is there; `stands`: its table as well."""

    def check(path: Path, progress: Progress) -> Iterator[str]:
        try:
            tenant = TenantFile.read(path)
        except (HplmError, OSError) as error:
            yield f"tenant {path.parent.parent.name}: {error}"
            return
        for name in ("head.safetensors", *["adapter.safetensors"] * bool(tenant.rank)):
            if not (path.parent / name).exists():
                yield f"tenant {tenant.id}: {path.parent / name} is missing: build or copy it again"
        table = store / "plot" / tenant.domain / str(tenant.domain_version)
        if stands and not table.is_dir():
            yield f"tenant {tenant.id} stands on {table}, which is missing: copy that table again, or build the tenant again"

    return check


def _check_branch(store: Path) -> Callable[[Path, Progress], Iterator[str]]:
    """The table, and whether what it falls back to is there."""

    def check(folder: Path, progress: Progress) -> Iterator[str]:
        yield from check_table(folder, progress)
        with suppress(HplmError, OSError):  # that was named
            meta = TableMeta.load(folder / "meta.json")
            if meta.parent is not None and not (parent := store / "plot" / meta.parent / str(meta.parent_version)).is_dir():
                yield f"table {folder} falls back to {parent}, which is missing: copy that table again, or build both again"

    return check


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
                f"registry {path} knows generation {decided} and {live.current_file} publishes {after}: the next change with "
                "`hplm tenant` or `hplm domain` publishes the newest, or restore the state"
            )
        elif decided < before:
            yield f"registry {path} knows generation {decided} and {live.current_file} publishes {before}: restore the state"

    return check


def _decided(registry: Path) -> int:
    """The newest generation of a registry, if that is whole; 0 where its first change has failed."""
    try:
        with closing(sqlite3.connect(f"{registry.resolve().as_uri()}?mode=ro", uri=True)) as database:
            found = [row[0] for row in database.execute("PRAGMA integrity_check")]
            if found == ["ok"]:
                if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'audit'").fetchone() is None:
                    return 0
                return database.execute("SELECT max(generation) FROM audit").fetchone()[0] or 0
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    raise Broken(f"{'; '.join(found)}: restore the state; what is published goes on")


def check_table(folder: Path, progress: Progress) -> Iterator[str]:
    try:
        table = Table(folder)
    except (HplmError, OSError, KeyError, TypeError) as error:
        yield f"table {folder}: {error}"
        return
    try:
        _ = table.index  # read as a whole when it is opened
        progress(sum(table.meta.index.sizes().values()))
    except HplmError as error:
        yield f"table {folder}: {error}"
    wrong: list[int] = []
    for start in range(0, table.size, ROWS):
        rows = np.arange(start, min(start + ROWS, table.size))
        wrong += table.rows.touch(rows).tolist()
        progress(len(rows) * table.meta.row_bytes)
    if wrong:
        yield f"table {folder}: checksum mismatch in {_named('row', wrong)} of values: build or copy the table again"


def check_bank(path: Path, progress: Progress, way_out: str = EXPORT_AGAIN) -> Iterator[str]:
    try:
        bank = Bank(path, way_out)
    except (HplmError, OSError, KeyError, TypeError) as error:
        yield f"bank {path}: {error}"
        return
    wrong = []
    layout = bank.layout
    with open(path, "rb") as file:
        file.seek(PAGE)
        for index in range(bank.records):
            record = file.read(record_bytes(layout))
            checksum = HEADER.unpack_from(record)[2]
            if zlib.crc32(record[HEADER_BYTES : HEADER_BYTES + layout.weight_bytes]) != checksum:
                wrong.append(index)
            progress(len(record))
    if wrong:
        yield f"bank {path}: checksum mismatch in {_named('record', wrong)}: {way_out}"


def check_counts(folder: Path, progress: Progress) -> Iterator[str]:
    try:
        Counts(folder)
    except (HplmError, OSError, ValueError, KeyError) as error:
        yield f"counts {folder}: {error}"


def check_file(path: Path, progress: Progress) -> Iterator[str]:
    """Weights against their checksum; the others have none, and are read as their readers do."""
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
    except Exception as error:  # the tokenizer library throws nothing narrower
        yield f"file {path} cannot be read: {error}"


def _promises(folder: Path, live: Any) -> Callable[[Path, Progress], Iterator[str]]:
    """Whether what a snapshot names is there, and whose it says it is."""

    def check(path: Path, progress: Progress) -> Iterator[str]:
        try:
            snapshot = Snapshot.load(path)
        except (HplmError, OSError, KeyError, TypeError) as error:
            yield f"snapshot {path}: {error}"
            return
        roots = [folder / Backbone.TABLES] + ([live.tables] if live else [])
        for branch in snapshot.branches:
            if not any((root / branch.folder / "meta.json").exists() for root in roots):
                yield f"snapshot {path}: table {branch.folder} is in none of {', '.join(map(str, roots))}"
        banks: dict[str, Bank | None] = {}
        for name in snapshot.banks():
            try:
                banks[name] = live.open_bank(name) if live and name.startswith(LIVE) else Bank(folder / Backbone.BANKS / name)
            except (HplmError, OSError, KeyError, TypeError) as error:
                banks[name] = None
                yield f"snapshot {path}: {error}"
        for tenant in snapshot.tenants:
            for record in (tenant.head, tenant.adapter):
                bank = banks[record.bank] if record is not None else None
                if bank is None:
                    continue
                if not 0 <= record.index < bank.records:
                    yield f"tenant {tenant.id}: bank {record.bank} has no record {record.index}"
                    continue
                with open(bank.path, "rb") as file:
                    file.seek(PAGE + record.index * record_bytes(bank.layout))
                    uid, version, _ = HEADER.unpack(file.read(HEADER.size))
                if (uid, version) != (record.uid, record.version):
                    yield f"tenant {tenant.id}: record {record.index} of bank {record.bank} is another's, or of another version"

    return check


def _named(kind: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:NAMED])) + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")
    return f"{kind}{'s' if len(numbers) > 1 else ''} {shown}"
