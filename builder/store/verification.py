"""Checks everything in a store against its checksums, and names every broken part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from builder.store.branches import check_root
from builder.store.store import Store
from builder.store.version import REPORT, described, read_version
from builder.tables.counts import Counts
from hplm.errors import HplmError
from hplm.plot.table import TableMeta
from hplm.tenants.verification import Part, Progress, check_file, check_table, versions


def store_parts(folder: Path) -> list[Part]:
    store = Store(folder)
    check_root(folder)
    files = [folder / "tokenizer.json", folder / "upper.safetensors", *sorted(folder.glob("lower/*.safetensors"))]
    files += [path / REPORT for path in versions(folder / "tenants")]
    tables = [Part("table", table, _check_branch(folder)) for table in versions(folder / "plot")]
    counts = [Part("counts", meta.parent, check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    return tables + counts + [Part("file", file, check_file) for file in files] + _tenant_parts(store)


def _tenant_parts(store: Store) -> list[Part]:
    """Only the newest version of a tenant needs its table: tables of older versions may be removed."""
    folders = versions(store.folder / "tenants")
    newest = set({folder.parent: folder for folder in folders}.values())
    return [Part("record", folder, _check_tenant(store, folder in newest)) for folder in folders]


def _check_tenant(store: Store, stands: bool) -> Callable[[Path, Progress], Iterator[str]]:
    """Returns a check of a version's record and, with `stands`, of whether its table exists."""

    def check(folder: Path, progress: Progress) -> Iterator[str]:
        try:
            tenant = described(folder)
            read_version(folder, store.config)
        except (HplmError, OSError) as error:
            yield f"tenant {folder.parent.name}: {error}"
            return
        table = store.table_folder(tenant.domain, tenant.domain_version)
        if stands and not table.is_dir():
            yield f"tenant {tenant.id} stands on {table}, which is missing: copy that table again, or build the tenant again"

    return check


def _check_branch(store: Path) -> Callable[[Path, Progress], Iterator[str]]:
    """Returns a check of a table, and of whether its parent exists."""

    def check(folder: Path, progress: Progress) -> Iterator[str]:
        yield from check_table(folder, progress)
        with suppress(HplmError, OSError):  # check_table has named it
            meta = TableMeta.load(folder / "meta.json")
            if meta.parent is not None and not (parent := store / "plot" / meta.parent / str(meta.parent_version)).is_dir():
                yield f"table {folder} falls back to {parent}, which is missing: copy that table again, or build both again"

    return check


def check_counts(folder: Path, progress: Progress) -> Iterator[str]:
    try:
        Counts(folder)
    except (HplmError, OSError, ValueError, KeyError) as error:
        yield f"counts {folder}: {error}"
