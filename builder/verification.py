"""Everything that is stored, against its checksums: whatever is broken is named, all of it."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from builder.counts import Counts
from builder.store import Store
from builder.weights import CHECKSUM, checksum_of
from hplm.adapters.bank import HEADER, HEADER_BYTES, PAGE, Bank, record_bytes
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError, InvalidInput
from hplm.plot.table import Table
from hplm.tenants.snapshot import LIVE, Snapshot
from hplm.tenants.state import State

ROWS = 4096  # of a table that are read at once
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
    tables = [Part("table", store.table_folder(*branch), check_table) for branch in store.domains()]
    counts = [Part("counts", meta.parent, check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    return tables + counts + [Part("file", file, check_file) for file in files if not _is_unfinished(file, folder)]


def _is_unfinished(file: Path, store: Path) -> bool:
    place = file.relative_to(store).parts
    return file.suffix == ".writing" or (place[0] == "tenants" and not place[2].isdecimal())


def repository_parts(repository: Path, state: Path | None) -> list[Part]:
    folders = [path.parent for path in sorted(repository.glob(f"*/1/{Backbone.CONFIG}"))]
    if not folders:
        raise InvalidInput(f"{repository} holds no backbone: name the folder that `hplm export` wrote")
    parts = []
    for folder in folders:
        live = State(state / folder.parent.name) if state is not None else None
        places = [(folder / Backbone.TABLES, folder / Backbone.BANKS)] + ([(live.tables, live.banks)] if live else [])
        for tables, banks in places:
            found = sorted(path.parent for path in tables.glob("*/*/meta.json") if path.parent.name.isdecimal())
            parts += [Part("table", table, check_table) for table in found]
            parts += [Part("bank", bank, check_bank) for bank in sorted(banks.glob("*.bank"))]
        files = [folder / name for name in (Backbone.CONFIG, Backbone.TOKENIZER, Backbone.UPPER)]
        parts += [Part("file", file, check_file) for file in files]
        snapshots = [folder / Backbone.TENANTS]
        if live is not None and live.current():  # those before it may name what is gone by now
            snapshots.append(live.snapshots / str(live.current()))
            parts.append(Part("registry", live.registry, check_registry))
        parts += [Part("snapshot", snapshot, _promises(folder, live)) for snapshot in snapshots]
    return parts


def check_registry(path: Path, progress: Progress) -> Iterator[str]:
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        found = [row[0] for row in database.execute("PRAGMA integrity_check")]
        database.close()
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    if found != ["ok"]:
        yield f"registry {path}: {'; '.join(found)}: restore the state; what is published goes on"


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


def check_bank(path: Path, progress: Progress) -> Iterator[str]:
    try:
        bank = Bank(path)
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
        yield f"bank {path}: checksum mismatch in {_named('record', wrong)}: export or restore the tenants these belong to"


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
            with safe_open(path, "pt") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                promised = (stored.metadata() or {}).get(CHECKSUM)
            progress(sum(tensor.nbytes for tensor in tensors.values()))
            if promised not in (None, checksum_of(tensors)):
                yield f"file {path} does not match its checksum: build or copy it again"
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
            if not any((root / branch.folder).is_dir() for root in roots):
                yield f"snapshot {path}: table {branch.folder} is in none of {', '.join(map(str, roots))}"
        banks: dict[str, Bank | None] = {}
        for name in snapshot.banks():
            where = folder / Backbone.BANKS / name
            if name.startswith(LIVE):
                where = live.banks / name.removeprefix(LIVE) if live else where
            try:
                banks[name] = Bank(where)
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
