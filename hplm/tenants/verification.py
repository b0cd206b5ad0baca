"""Verifies a repository and its registry against their checksums, and names everything that is broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hplm.adapters.layout import Layout
from hplm.adapters.record import ENDING, has_content
from hplm.adapters.records import WAY_OUT, Records
from hplm.errors import Broken, HplmError, InvalidInput, some
from hplm.model.original import check_finite
from hplm.model.weights import load_weights
from hplm.plot.table import Table
from hplm.tenants.snapshot import EXPORT_AGAIN, RESTORE, Snapshot
from hplm.tenants.state_folder import (
    EXPORTED_CONFIG,
    EXPORTED_TABLES,
    EXPORTED_TENANTS,
    EXPORTED_TOKENIZER,
    EXPORTED_UPPER,
    RECORDS,
    StateFolder,
)

WHOLE_MODELS = "whole.json"  # a file that only exports of `research.schemes` have
VERSION = re.compile(r"\d+(-[0-9a-f]+)?")  # a table that was added live has a unique name

Progress = Callable[[int], object]


@dataclass(frozen=True)
class CheckedPath:
    """A file or folder to check. `check` yields its errors, and reports how many bytes it has read."""

    kind: str
    path: Path
    check: Callable[[Path, Progress], Iterator[str]]

    @property
    def size(self) -> int:
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


def repository_parts(repository: Path, state: Path | None) -> list[CheckedPath]:
    folders = [path.parent for path in sorted(repository.glob(f"*/1/{EXPORTED_CONFIG}"))]
    folders = [folder for folder in folders if folder.parent.suffix != ".writing"]
    if not folders:
        raise InvalidInput(f"{repository} contains no backbone: name the folder that `hplm export` wrote")
    for folder in folders:
        if (folder / WHOLE_MODELS).exists():
            raise InvalidInput(
                f"{folder.parent} has a whole model for each tenant, without checksums: export it again if you doubt its files"
            )
    parts: list[CheckedPath] = []
    states = {folder: StateFolder(state / folder.parent.name) for folder in folders if state is not None}
    if state is not None and not any(live.current_file.exists() for live in states.values()):
        places = ", ".join(str(live.folder) for live in states.values())
        raise InvalidInput(
            f"{state} contains no registry: CURRENT is in none of {places}. Name the folder of "
            "`hplm serve --state`, or leave --state out if nothing was changed yet"
        )
    for folder in folders:
        live = states.get(folder)
        for tables in [folder / EXPORTED_TABLES, *([live.tables] if live else [])]:
            parts += [CheckedPath("table", table, check_table) for table in versions(tables) if (table / "meta.json").exists()]
            parts += [
                CheckedPath("record", file, _check_record) for file in sorted((tables.parent / RECORDS).glob(f"*{ENDING}"))
            ]
        files = [folder / name for name in (EXPORTED_CONFIG, EXPORTED_TOKENIZER, EXPORTED_UPPER)]
        parts += [CheckedPath("file", file, check_file) for file in files]
        parts.append(CheckedPath("snapshot", folder / EXPORTED_TENANTS, partial(_check_snapshot, folder, live, EXPORT_AGAIN)))
        if live is not None and live.current_file.exists():
            parts.append(CheckedPath("file", live.current_file, partial(_check_current, folder, live)))
    return parts


def versions(folder: Path) -> list[Path]:
    """Returns all versions of all domains or tenants in a folder. One whose name begins with its number is complete."""
    found = [path for path in folder.glob("*/*") if VERSION.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.parent.name, int(path.name.partition("-")[0])))


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
    if table.lower.exists():
        yield from check_file(table.lower, progress)
    if wrong := list(table.rows.broken(progress)):
        rows = f"row{'s' if len(wrong) > 1 else ''} {some(wrong)}"
        yield f"table {folder}: checksum mismatch in {rows} of values: build or copy the table again"


def _check_record(path: Path, progress: Progress) -> Iterator[str]:
    try:
        if not has_content(path.name, path.read_bytes()):
            yield f"record {path}: checksum mismatch: {WAY_OUT}"
    except OSError as error:
        yield f"cannot read record {path}: {error}"


def check_file(path: Path, progress: Progress) -> Iterator[str]:
    """Checks weights against their checksum, and for NaN. Other files have no checksum, so they are only read."""
    from tokenizers import Tokenizer

    try:
        if path.name == "tokenizer.json":
            Tokenizer.from_str(path.read_text("utf-8"))
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        else:
            weights = load_weights(path)
            progress(sum(tensor.nbytes for tensor in weights.values()))
            check_finite(path, weights)
    except Broken as error:
        yield f"file {error}"
    except InvalidInput as error:
        yield str(error)
    except Exception as error:  # the tokenizer library raises no narrower type
        yield f"cannot read file {path}: {error}"


def _check_current(folder: Path, live: StateFolder, path: Path, progress: Progress) -> Iterator[str]:
    """Checks CURRENT and the newest snapshot: older ones may name files that were removed."""
    try:
        pointer = live.pointer()
    except HplmError as error:
        yield f"file {error}"
        return
    if pointer is not None and pointer.generation:
        yield from _check_snapshot(folder, live, RESTORE, live.snapshots / pointer.snapshot, progress)


def _check_snapshot(folder: Path, live: StateFolder | None, way_out: str, path: Path, progress: Progress) -> Iterator[str]:
    """Checks that the tables of a snapshot exist, and that all records of its tenants are as it says."""
    try:
        snapshot = Snapshot.load(path, way_out)
    except (HplmError, OSError) as error:
        yield f"snapshot {path}: {error}"
        return
    places = [folder, *([live.folder] if live is not None else [])]
    for branch in snapshot.branches:
        if not any((place / EXPORTED_TABLES / branch.folder / "meta.json").exists() for place in places):
            yield f"snapshot {path}: table {branch.folder} is missing in {' and '.join(map(str, places))}"
    records = Records(*(place / RECORDS for place in places))
    for tenant in (*snapshot.tenants, *snapshot.ledger.before):
        for record in tenant.records():
            try:
                records.read(record, Layout.of(record.layout).empty())
            except HplmError as error:
                yield f"tenant {tenant.id}: {error}"
