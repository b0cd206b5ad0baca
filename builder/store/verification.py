"""Checks everything in a store against its checksums, and names every broken part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from builder.store.branches import check_root
from builder.store.store import Store
from builder.store.version import REPORT, described, read_version
from builder.tables.counts import Counts
from hplm.errors import HplmError
from hplm.plot.meta import TableMeta
from hplm.tenants.verification import CheckedPath, Progress, check_file, check_table, versions


def store_parts(folder: Path) -> list[CheckedPath]:
    store = Store(folder)
    check_root(folder)
    files = [folder / "tokenizer.json", folder / "upper.safetensors", *sorted(folder.glob("lower/*.safetensors"))]
    files += [path / REPORT for path in versions(folder / "tenants")]
    tables = [CheckedPath("table", table, partial(_check_branch, folder)) for table in versions(folder / "plot")]
    counts = [CheckedPath("counts", meta.parent, _check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    tenants = versions(folder / "tenants")
    newest = set({version.parent: version for version in tenants}.values())  # tables of older versions may be removed
    records = [CheckedPath("record", version, partial(_check_tenant, store, version in newest)) for version in tenants]
    return tables + counts + [CheckedPath("file", file, check_file) for file in files] + records


def _check_tenant(store: Store, stands: bool, folder: Path, progress: Progress) -> Iterator[str]:
    """Checks a version's record and, with `stands`, whether its table exists."""
    try:
        tenant = described(folder)
        read_version(folder)
    except (HplmError, OSError) as error:
        yield f"tenant {folder.parent.name}: {error}"
        return
    table = store.table_folder(tenant.domain, tenant.domain_version)
    if stands and not table.is_dir():
        yield f"tenant {tenant.id} stands on {table}, which is missing: copy that table again, or build the tenant again"


def _check_branch(store: Path, folder: Path, progress: Progress) -> Iterator[str]:
    """Checks a table, and whether its parent exists."""
    yield from check_table(folder, progress)
    with suppress(HplmError, OSError):  # check_table has named it
        meta = TableMeta.load(folder / "meta.json")
        if meta.parent is not None and not (parent := store / "plot" / meta.parent / str(meta.parent_version)).is_dir():
            yield f"table {folder} falls back to {parent}, which is missing: copy that table again, or build both again"


def _check_counts(folder: Path, progress: Progress) -> Iterator[str]:
    try:
        Counts(folder)
    except (HplmError, OSError, ValueError, KeyError) as error:
        yield f"counts {folder}: {error}"
