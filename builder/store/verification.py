"""Checks everything in a store against its checksums, and names every broken part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from builder.store.calibrations import read_calibrated
from builder.store.levels import UNFINISHED, WAY_OUT, ladder_of, levels_of, stored_levels
from builder.store.links import link_of
from builder.store.store import Store, TenantFile
from builder.tables.counts import Counts
from hplm.errors import HplmError
from hplm.plot.table import TableMeta
from hplm.tenants.verification import Part, Progress, check_file, check_stack, check_table, versions

TENANT = "tenant.json"


def store_parts(folder: Path) -> list[Part]:
    store = Store(folder)
    files = [folder / "tokenizer.json", folder / "upper.safetensors", *sorted(folder.glob("lower/*.safetensors"))]
    of_tenants = [*folder.glob("tenants/*/*/*.*"), *folder.glob("tenants/*/*/levels/*/*.*")]
    files += [path for path in sorted(of_tenants) if path.suffix in (".json", ".safetensors")]
    files = [file for file in files if file.name != TENANT and not _is_unfinished(file, folder)]
    files += [store.stack_file(name, ".json") for name in store.stacks()]
    stacks = [Part("file", store.stack_file(name), check_stack) for name in store.stacks()]
    tables = [Part("table", table, _check_branch(folder)) for table in versions(folder / "plot")]
    counts = [Part("counts", meta.parent, check_counts) for meta in sorted(folder.glob("counts/*/*/meta.json"))]
    return tables + counts + [Part("file", file, check_file) for file in files] + stacks + _tenant_parts(store)


def _is_unfinished(file: Path, store: Path) -> bool:
    """Whether a build or a removal was killed while it wrote or removed this."""
    place = file.relative_to(store).parts
    return file.suffix == ".writing" or (
        place[0] == "tenants" and not (place[2].isdecimal() and not file.parent.name.endswith(UNFINISHED))
    )


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
        try:
            opened = Store(store)
            read_calibrated(opened, tenant)
            for level in levels_of(opened, tenant) if stands else stored_levels(opened, tenant):
                for name in ("head.safetensors", *["adapter.safetensors"] * bool(level.file.rank)):
                    if not (level.folder / name).exists():
                        yield f"tenant {tenant.id}: {level.folder / name} is missing: {WAY_OUT}"
            ladder_of(opened, tenant)
            link_of(opened, tenant)
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
