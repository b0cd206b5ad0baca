"""Checks everything in a store against its checksums, and names every broken part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from builder.store.calibrations import FILE as CALIBRATION
from builder.store.calibrations import read_calibrated
from builder.store.exits import FILE as EXITS
from builder.store.exits import read_exits
from builder.store.store import Store, TenantFile
from builder.tables.counts import Counts
from hplm.errors import HplmError
from hplm.plot.table import TableMeta
from hplm.tenants.verification import Part, Progress, check_file, check_table, versions

TENANT = "tenant.json"
CHECKED = ("*.safetensors", "report.json", CALIBRATION, EXITS)  # of a version; earlier versions of hplm left others


def store_parts(folder: Path) -> list[Part]:
    store = Store(folder)
    files = [folder / "tokenizer.json", folder / "upper.safetensors", *sorted(folder.glob("lower/*.safetensors"))]
    of_tenants = sorted(path for name in CHECKED for path in folder.glob(f"tenants/*/*/{name}"))
    files += [path for path in of_tenants if path.parent.name.isdecimal()]  # others are unfinished
    tables = [Part("table", table, _check_branch(folder)) for table in versions(folder / "plot")]
    counts = [Part("counts", meta.parent, check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    return tables + counts + [Part("file", file, check_file) for file in files] + _tenant_parts(store)


def _tenant_parts(store: Store) -> list[Part]:
    """Only the newest version of a tenant needs its table: tables of older versions may be removed."""
    folders = versions(store.folder / "tenants")
    newest = set({folder.parent: folder for folder in folders}.values())
    return [Part("tenant", folder / TENANT, _check_tenant(store.folder, folder in newest)) for folder in folders]


def _check_tenant(store: Path, stands: bool) -> Callable[[Path, Progress], Iterator[str]]:
    """Returns a check that a tenant's files exist and, with `stands`, its table too."""

    def check(path: Path, progress: Progress) -> Iterator[str]:
        try:
            tenant = TenantFile.read(path)
        except (HplmError, OSError) as error:
            yield f"tenant {path.parent.parent.name}: {error}"
            return
        for name in (*["head.safetensors"] * tenant.has_head, *["adapter.safetensors"] * bool(tenant.rank)):
            if not (path.parent / name).exists():
                yield f"tenant {tenant.id}: {path.parent / name} is missing: build or copy it again"
        for read in (read_calibrated, read_exits):
            try:
                read(Store(store), tenant)
            except HplmError as error:
                yield f"tenant {tenant.id}: {error}"
        table = store / "plot" / tenant.domain / str(tenant.domain_version)
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
