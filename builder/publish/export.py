"""Exports a store as Triton model folders: the ensemble, its two models, and the files they share."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from builder.publish.model_configs import ServingOptions, check_options, is_of_decoder, write_configs
from builder.store.store import Store, TenantFile, written_folder
from hplm.adapters import records
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.plot.branch import Branch
from hplm.plot.forest import assign_addresses
from hplm.plot.room import bytes_in, check_room
from hplm.plot.table import TableMeta
from hplm.server import folder_lock
from hplm.tenants.models import upper_name, upper_of
from hplm.tenants.snapshot import Ledger, Snapshot, Tenant

OLD = ".old"  # ends the name of a version folder that is being replaced
ELSEWHERE = "export into another --repository, so that `hplm begin --from` can still read this one, or give --replace"
SCHEME = "hplm"  # the scheme of `export`; other packages export other schemes


@dataclass(frozen=True)
class Exported:
    backbone: str
    tenants: int
    tables: int
    folder: Path


def export(
    store: Store, repository: Path, options: ServingOptions, replace: bool = False, while_served: bool = False
) -> Exported:
    """Writes `<backbone>`, `<backbone>-lookup` and `<backbone>-upper`; of a decoder, `<backbone>` alone.

    The version folder is written completely beside the old one and then takes its name. Tenants that only the repository has
    are dropped only with `replace`. A backbone that a server serves is replaced only with `while_served`. Such a server keeps
    the old export and must be restarted at once: an engine that it starts again takes the new one.
    """
    check_export(store, options)
    _refuse_other_kind(repository, store.config)
    _refuse_group(repository, store.config.name)
    tenants = store.tenants()
    name = store.config.name
    version_folder = repository / name / "1"
    with folder_lock.alone(repository / name, while_served):
        _put_back(version_folder)
        if version_folder.exists() and not replace:
            known = {tenant.id for tenant in Snapshot.load(version_folder / Backbone.TENANTS, ELSEWHERE).tenants}
            refuse_loss(version_folder, known, tenants)
        branches = write_version(store, tenants, version_folder)
        write_configs(repository, store.config, options)
    return Exported(name, len(tenants), len(branches), repository / name)


def write_version(store: Store, tenants: list[TenantFile], version_folder: Path) -> list[Branch]:
    """Writes what the processes of a server open: the backbone, its tables, and the tenants. Returns the tables."""
    with _replaced_folder(version_folder) as folder:
        (folder / Backbone.RECORDS).mkdir()
        store.config.save(folder / Backbone.CONFIG)
        for file in (Backbone.TOKENIZER, Backbone.UPPER):
            copy_file(store.folder / file, folder / file)
        branches = assign_addresses(store.table(*branch) for branch in _needed(store, tenants))
        tables = [store.folder / "plot" / branch.folder for branch in branches]
        check_copies(tables, folder)
        for branch, table in zip(branches, tables, strict=True):
            for file in sorted(table.iterdir()):
                copy_file(file, folder / Backbone.TABLES / branch.folder / file.name)
        write_tenants(folder, branches, [_recorded(store, tenant, uid, folder) for uid, tenant in enumerate(tenants, start=1)])
    return branches


def check_export(store: Store, options: ServingOptions) -> None:
    """Refuses what cannot be exported, before anything is measured or written."""
    if not store.tenants():
        raise InvalidInput(f"{store.folder} has no tenants to export: build one with `hplm build tenant`")
    check_options(store.config, options)


def _needed(store: Store, tenants: list[TenantFile]) -> list[tuple[str, int]]:
    """Returns the tables that tenants use, the newest of each domain, and those they fall back to; the root first."""
    needed = {(tenant.domain, tenant.domain_version) for tenant in tenants}
    needed |= {(domain, store.latest(domain)) for domain, _ in store.domains()}
    for start in list(needed):
        step: tuple[str, int] | None = start
        while step is not None:
            needed.add(step)
            step = store.table(*step).meta.parent_branch
    return [branch for branch in store.domains() if branch in needed]


def refuse_loss(folder: Path, known: Iterable[str], tenants: list[TenantFile]) -> None:
    """Refuses to drop tenants that the repository serves. `known`: the ids served there now."""
    lost = sorted(set(known) - {tenant.id for tenant in tenants})
    if lost:
        raise InvalidInput(
            f"{folder} serves {len(lost)} tenants that this store does not have ({', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}): export from the store they were built in, or give --replace to drop them"
        )


def refuse_mixture(repository: Path, name: str, scheme: str = SCHEME) -> None:
    """Refuses a second scheme of a backbone in one repository."""
    for config in sorted([*repository.glob(f"{name}/config.pbtxt"), *repository.glob(f"{name}-*/config.pbtxt")]):
        found = re.search(r'key: "scheme"\s+value \{ string_value: "(\w+)"', config.read_text("utf-8"))
        served = found[1] if found else SCHEME
        if served != scheme and config.parent.name.split(f"{name}-")[-1] not in ("lookup", "upper", "admin"):
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
    """Refuses to export a backbone that one engine computes with others: it would get a second engine beside."""
    upper = upper_of(repository, name)
    if upper != upper_name([name]):
        raise InvalidInput(
            f"{repository / upper} computes {name!r} together with others: export into the repository that the group was "
            "emitted from, and run `hplm place emit` again"
        )


def _put_back(folder: Path) -> None:
    """Puts the old folder back where `_replaced_folder` was killed between its two renames."""
    old = folder.with_name(folder.name + OLD)
    if old.exists() and not folder.exists():
        old.rename(folder)


@contextmanager
def _replaced_folder(folder: Path) -> Generator[Path, None, None]:
    """Like `written_folder`, but replaces a folder of that name."""
    fresh = folder.with_name(folder.name + ".new")
    old = folder.with_name(folder.name + OLD)
    for left_behind in (fresh, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    with written_folder(fresh) as writing:
        yield writing
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _recorded(store: Store, tenant: TenantFile, uid: int, folder: Path) -> Tenant:
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
    """Returns a digest of the export's content, by which a live state recognises its export."""
    content = hashlib.sha256(repr((list(branches), list(tenants))).encode())
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
