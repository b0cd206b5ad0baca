"""Exports a store as Triton model folders: the ensemble, its two models, and the files they share."""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.publish.model_configs import ServingOptions, check_options, is_of_decoder, write_configs
from builder.store.branches import check_root
from builder.store.store import Store, TenantVersion, written_folder
from hplm.adapters import records
from hplm.disk import bytes_in, check_room
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput, some
from hplm.model.config import BackboneConfig
from hplm.plot.forest import assign_addresses
from hplm.plot.meta import TableMeta
from hplm.plot.table import Branch
from hplm.tenants.filter import FILE as FILTER
from hplm.tenants.snapshot import Ledger, Snapshot, Tenant

ELSEWHERE = "export into another --repository, or replace it by `hplm export --replace` after its servers have stopped"
SCHEME = "hplm"  # the scheme of `export`; other packages export other schemes


@dataclass(frozen=True)
class Exported:
    backbone: str
    tenants: int
    tables: int
    folder: Path
    is_new: bool = True  # False: an earlier export has the same content, and stays


def export(
    store: Store, repository: Path, options: ServingOptions, replace: bool = False, settings_only: bool = False
) -> Exported:
    """Writes `<backbone>`, `<backbone>-lookup` and `<backbone>-upper`; of a decoder, `<backbone>` alone.

    If there is an export with the same content, only the configurations are written. `replace` writes all files, also over
    another export, which a server or a registry may need. `settings_only` writes the configurations of an export of this root,
    and keeps its tables and tenants.
    """
    options = options.for_longest_text(store.config)
    check_export(store, options)
    _refuse_other_kind(repository, store.config)
    _refuse_group(repository, store.config.name)
    tenants = store.tenants()
    name = store.config.name
    if settings_only:
        kept = _export_of_root(store, repository / name / "1")
        write_configs(repository, store.config, options)
        return Exported(name, len(kept.tenants), len(kept.branches), repository / name, is_new=False)
    is_new = replace or not (repository / name / "1").exists()
    branches = write_version(store, tenants, repository / name / "1", replace)
    write_configs(repository, store.config, options)
    return Exported(name, len(tenants), len(branches), repository / name, is_new)


def write_version(store: Store, tenants: list[TenantVersion], version_folder: Path, replace: bool = False) -> list[Branch]:
    """Writes what the processes of a server open: the backbone, its tables, and the tenants. Returns the tables."""
    fresh = version_folder.with_name(f"{version_folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with written_folder(fresh) as folder:
        (folder / Backbone.RECORDS).mkdir()
        store.config.save(folder / Backbone.CONFIG)
        for file in (Backbone.TOKENIZER, Backbone.UPPER):
            copy_file(store.folder / file, folder / file)
        tables = [store.table(*branch) for branch in _needed(store, tenants)]
        branches = assign_addresses(tables)
        check_copies([place for table in tables for place in (table.folder, table.lower) if place.exists()], folder)
        for branch, table in zip(branches, tables, strict=True):
            for name, file in table.files().items():
                copy_file(file, folder / Backbone.TABLES / branch.folder / name)
        write_tenants(folder, branches, [_recorded(store, tenant, uid, folder) for uid, tenant in enumerate(tenants, start=1)])
    if version_folder.exists() and not replace:
        try:
            _check_same(version_folder, fresh)
        finally:
            shutil.rmtree(fresh)
        return branches
    shutil.rmtree(version_folder, ignore_errors=True)
    fresh.rename(version_folder)
    return branches


def _check_same(folder: Path, fresh: Path) -> None:
    """Raises if an export has another content than a new one, or lacks files of it, as exports of earlier commits do."""
    if Snapshot.load(folder / Backbone.TENANTS, ELSEWHERE).export != Snapshot.load(fresh / Backbone.TENANTS).export:
        raise InvalidInput(
            f"{folder} has another content than this store, and servers and registries may need it: publish the changes with "
            f"`hplm tenant publish` and `hplm domain update`, change settings alone with --settings-only, {ELSEWHERE}"
        )
    there, here = ({str(file.relative_to(place)) for file in place.rglob("*")} for place in (folder, fresh))
    if lacking := sorted(here - there):
        raise InvalidInput(f"{folder} lacks {some(lacking)}, which this store has: {ELSEWHERE}")


def _export_of_root(store: Store, folder: Path) -> Snapshot:
    """Returns what an export of this root has."""
    kept = Snapshot.load(folder / Backbone.TENANTS, "export without --settings-only")
    for file in (Backbone.CONFIG, Backbone.UPPER):
        if not filecmp.cmp(folder / file, store.folder / file, shallow=False):
            raise InvalidInput(f"{folder} was exported from another store than {store.folder}: name the one it came from")
    return kept


def check_export(store: Store, options: ServingOptions) -> None:
    """Refuses what cannot be exported, before anything is measured or written."""
    check_root(store.folder)
    if not store.tenants():
        raise InvalidInput(f"{store.folder} has no tenants to export: build one with `hplm build tenant`")
    check_options(store.config, options)


def _needed(store: Store, tenants: list[TenantVersion]) -> list[tuple[str, int]]:
    """Returns the tables that tenants use, the newest of each domain, and those they fall back to; the root first."""
    starts = {(tenant.domain, tenant.domain_version) for tenant in tenants}
    starts |= {(domain, store.latest(domain)) for domain, _ in store.domains()}
    needed = {step for start in starts for step in store.chain(*start)}
    return [branch for branch in store.domains() if branch in needed]


def refuse_mixture(repository: Path, name: str, scheme: str = SCHEME) -> None:
    """Refuses a second scheme of a backbone in one repository."""
    for config in sorted([*repository.glob(f"{name}/config.pbtxt"), *repository.glob(f"{name}-*/config.pbtxt")]):
        found = re.search(r'key: "scheme"\s+value \{ string_value: "(\w+)"', config.read_text("utf-8"))
        served = found[1] if found else SCHEME
        if served != scheme and config.parent.name.split(f"{name}-")[-1] not in ("lookup", "upper"):
            raise InvalidInput(
                f"{config.parent} serves scheme {served!r} of backbone {name!r}: export {scheme!r} into another --repository"
            )


def _refuse_other_kind(repository: Path, config: BackboneConfig) -> None:
    """Refuses a decoder where an encoder of its name is served, and the reverse: its other models would stay behind."""
    found = repository / config.name / "config.pbtxt"
    if found.is_file() and is_of_decoder(found.read_text("utf-8")) != config.is_decoder:
        served, here = ("an encoder", "a decoder") if config.is_decoder else ("a decoder", "an encoder")
        raise InvalidInput(f"{found.parent} is {served}, but this store has {here}: export into another --repository")


def _refuse_group(repository: Path, name: str) -> None:
    """Refuses to export into a group's repository: the group would serve all tenants."""
    if (repository / name / "1" / FILTER).exists():
        raise InvalidInput(
            f"{repository} is that of a group, which serves a part of {name!r}: export into the repository that the group was "
            "emitted from, and run `hplm place emit` again"
        )


def _recorded(store: Store, tenant: TenantVersion, uid: int, folder: Path) -> Tenant:
    """Writes a tenant's record file, and returns the tenant as snapshots hold it. Uids count from 1, in the order of ids."""
    knowledge = store.knowledge(tenant)
    return knowledge.tenant(tenant.id, uid, tenant.version, records.write(folder / Backbone.RECORDS, knowledge.packed()))


def write_tenants(folder: Path, branches: Sequence[Branch], tenants: Sequence[Tenant]) -> None:
    """Writes the snapshot of an export, whose tables and records are in the folder."""
    last = max(branches, key=lambda branch: branch.base)
    free = last.base + TableMeta.load(folder / Backbone.TABLES / last.folder / "meta.json").rows
    ledger = Ledger(max((tenant.uid for tenant in tenants), default=0) + 1, free)
    Snapshot(0, branches, tenants, export_digest(folder, branches, tenants), ledger).save(folder / Backbone.TENANTS)


def export_digest(folder: Path, branches: Sequence[Branch], tenants: Sequence[Tenant]) -> str:
    """Returns a digest of the export's content, by which a registry recognises its export.

    Of an export without vectors, it is that of release 0.1.0.
    """
    content = hashlib.sha256(repr((list(branches), list(tenants))).encode())
    content.update("".join(repr(tenant.embedding) for tenant in tenants if tenant.embedding is not None).encode())
    content.update((folder / Backbone.UPPER).read_bytes())
    for branch in branches:
        for name in ("meta.json", "checksums"):
            content.update((folder / Backbone.TABLES / branch.folder / name).read_bytes())
    return content.hexdigest()[:16]


def check_copies(tables: Sequence[Path], folder: Path) -> None:
    """Refuses tables that the file system of `folder` has no room for. Where `copy_file` links them, they need none."""
    copied = [table for table in tables if table.stat().st_dev != folder.stat().st_dev]
    check_room(folder, bytes_in(*copied), f"what is copied from {', '.join(map(str, copied[:3]))}", "free some space there")


def copy_file(source: Path, target: Path) -> None:
    """Makes a hard link where the file system allows it: exported files are never changed in place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
