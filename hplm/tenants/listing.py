"""Lists for the commands: the served tenants of a repository, and the served branches of a backbone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hplm.errors import InvalidInput
from hplm.location import Location
from hplm.plot.meta import TableMeta
from hplm.tenants.keys import Key
from hplm.tenants.manager import Manager, exported_folder
from hplm.tenants.snapshot import Snapshot, Tenant
from hplm.tenants.state_folder import EXPORTED_TABLES, EXPORTED_TENANTS, named_folders


def served_tenants(repository: Path, state: Location | None = None, backbone: str | None = None) -> list[tuple[str, Tenant]]:
    """Returns all tenants with the names of their backbones, or only those of one backbone."""
    found: list[tuple[str, Tenant]] = []
    for folder in named_folders(repository, backbone):
        snapshot = Manager(folder, state).current() if state is not None else Snapshot.load(folder / EXPORTED_TENANTS)
        found += [(folder.parent.name, tenant) for tenant in snapshot.tenants]
    return found


def find_tenant(
    tenant_id: str, repository: Path, state: Location | None = None, backbone: str | None = None
) -> tuple[str, Tenant]:
    """Returns a tenant with the name of its backbone. Raises if several backbones have one of this id."""
    found = [served for served in served_tenants(repository, state, backbone) if served[1].id == tenant_id]
    if not found:
        raise InvalidInput(f"tenant {tenant_id!r} is not in {repository}: `hplm tenant list` lists all tenants")
    if len(found) > 1:
        which = ", ".join(name for name, _ in found)
        raise InvalidInput(f"several backbones ({which}) have a tenant {tenant_id!r}: name one of them with --backbone")
    return found[0]


def tenant_row(backbone: str, tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "backbone": backbone,
        "domain": tenant.domain,
        "domain_version": tenant.domain_version,
        "version": tenant.version,
        "task": tenant.task,
        "labels": list(tenant.labels),
        "homes": tenant.homes,
        "open": not tenant.keys,
    }


def described(tenant: Tenant) -> dict[str, Any]:
    """Returns all facts about a tenant, without the digests of its keys."""
    return {**asdict(tenant), "labels": list(tenant.labels), "keys": key_rows(tenant.keys)}


def key_rows(keys: tuple[Key, ...]) -> list[dict[str, Any]]:
    return [{"id": key.id, "expires": key.expires} for key in keys]


def served_branches(repository: Path, state: Location | None = None, backbone: str | None = None) -> list[dict[str, Any]]:
    """Returns every branch of a backbone with the number of its tenants. Without a state: those of the export."""
    folder = exported_folder(repository, backbone)
    manager = Manager(folder, state) if state is not None else None
    snapshot = manager.current() if manager is not None else Snapshot.load(folder / EXPORTED_TENANTS)
    tenants = Counter(tenant.branch_id for tenant in snapshot.tenants)
    rows: list[dict[str, Any]] = []
    for branch in sorted(snapshot.branches, key=lambda one: one.id):
        exported = folder / EXPORTED_TABLES / branch.folder / "meta.json"
        meta = manager.tables.meta(branch) if manager is not None else TableMeta.load(exported)
        rows.append(branch_row(meta, tenants[branch.id]))
    return rows


def branch_row(meta: TableMeta, tenants: int) -> dict[str, Any]:
    return {
        "domain": meta.domain,
        "version": meta.version,
        "parent": meta.parent,
        "parent_version": meta.parent_version,
        "ngrams": meta.keys,
        "tokens": meta.corpus_tokens,
        "mb": meta.megabytes,
        "dtype": meta.dtype,
        "tenants": tenants,
    }
