"""`hplm verify`: everything that is stored, against its checksums; whatever is broken is named, all of it."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def register(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="check every table, bank and file against its checksums",
        description="Reads all of a store or of a model repository; names everything that is broken and then ends with 1.",
    )
    what = verify.add_mutually_exclusive_group(required=True)
    what.add_argument("--store", type=Path, help="what `hplm build` made")
    what.add_argument("--repository", type=Path, help="what `hplm export` wrote")
    verify.add_argument("--state", type=Path, help="with --repository: what was changed since, while serving")
    verify.add_argument("--json", action="store_true", help="end with one line of JSON")
    verify.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    from tqdm import tqdm

    from hplm.errors import Broken, InvalidInput

    if args.state is not None and args.repository is None:
        raise InvalidInput("--state belongs to a --repository: name that as well")
    parts = store_parts(args.store) if args.store is not None else repository_parts(args.repository, args.state)
    size, broken = sum(part.size for part in parts), []
    with tqdm(total=size, desc="verifying", unit="B", unit_scale=True) as bar:
        for part in parts:
            before = bar.n
            broken += part.check(part.path, bar.update)
            bar.update(part.size - (bar.n - before))
    if broken:
        raise Broken("\n".join([f"{len(broken)} broken:", *(f"  {message}" for message in broken)]))
    kinds = [part.kind for part in parts]
    result = {"tables": kinds.count("table"), "banks": kinds.count("bank"), "files": kinds.count("file"), "gb": size / 1e9}
    if not args.json:
        print(f"ok: {result['tables']} tables, {result['banks']} banks, {result['gb']:,.3g} GB")
    return result


def store_parts(folder: Path) -> list[Part]:
    from builder.store import Store

    store = Store(folder)
    files = [folder / "tokenizer.json", folder / "upper.safetensors", *sorted(folder.glob("lower/*.safetensors"))]
    files += sorted(folder.glob("tenants/*/*/*.*"))
    tables = [Part("table", store.table_folder(*branch), check_table) for branch in store.domains()]
    counts = [Part("counts", meta.parent, check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    return tables + counts + [Part("file", file, check_file) for file in files if ".writing" not in str(file)]


def repository_parts(repository: Path, state: Path | None) -> list[Part]:
    from hplm.engine.backbone import Backbone
    from hplm.errors import InvalidInput
    from hplm.tenants.state import State

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
        parts += [Part("snapshot", snapshot, _promises(folder, live)) for snapshot in snapshots]
    return parts


def check_table(folder: Path, progress: Progress) -> Iterator[str]:
    import numpy as np

    from hplm.errors import HplmError
    from hplm.plot.table import Table

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
    from hplm.adapters.bank import HEADER, HEADER_BYTES, PAGE, Bank
    from hplm.errors import HplmError

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
            record = file.read(layout.record_bytes)
            checksum = HEADER.unpack_from(record)[2]
            if zlib.crc32(record[HEADER_BYTES : HEADER_BYTES + layout.weight_bytes]) != checksum:
                wrong.append(index)
            progress(len(record))
    if wrong:
        yield f"bank {path}: checksum mismatch in {_named('record', wrong)}: export or restore the tenants these belong to"


def check_counts(folder: Path, progress: Progress) -> Iterator[str]:
    from builder.counts import Counts
    from hplm.errors import HplmError

    try:
        Counts(folder)
    except (HplmError, OSError, ValueError, KeyError) as error:
        yield f"counts {folder}: {error}"


def check_file(path: Path, progress: Progress) -> Iterator[str]:
    """These have no checksums: they are read as their readers do."""
    import json

    from safetensors import safe_open
    from tokenizers import Tokenizer

    try:
        if path.name == "tokenizer.json":
            Tokenizer.from_str(path.read_text("utf-8"))
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        else:
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    progress(tensors.get_tensor(name).nbytes)
    except Exception as error:  # the tokenizer library throws nothing narrower
        yield f"file {path} cannot be read: {error}"


def _promises(folder: Path, live: Any) -> Callable[[Path, Progress], Iterator[str]]:
    """Whether what a snapshot names is there, and whose it says it is."""

    def check(path: Path, progress: Progress) -> Iterator[str]:
        from hplm.adapters.bank import HEADER, PAGE, Bank
        from hplm.engine.backbone import Backbone
        from hplm.errors import HplmError
        from hplm.tenants.snapshot import LIVE, Snapshot

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
                    file.seek(PAGE + record.index * bank.layout.record_bytes)
                    uid, version, _ = HEADER.unpack(file.read(HEADER.size))
                if (uid, version) != (record.uid, record.version):
                    yield f"tenant {tenant.id}: record {record.index} of bank {record.bank} is another's, or of another version"

    return check


def _named(kind: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:NAMED])) + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")
    return f"{kind}{'s' if len(numbers) > 1 else ''} {shown}"
