"""Publishes domains and tenants of a store to a repository's registry.

A tenant is pinned to the table version that it was trained on. So a new version of a domain comes with the tenants that were
trained on it; the others stay on their version, and are reported as behind.
"""

from __future__ import annotations

import filecmp
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from builder.store.store import Store
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput, some
from hplm.plot.table import Branch, Table
from hplm.tenants.change import Change, ChangeFiles
from hplm.tenants.keys import Key
from hplm.tenants.knowledge import TenantKnowledge
from hplm.tenants.manager import DomainChange, Manager, Published, TenantChange
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.tables import newest_version


def add_tenant(manager: Manager, store: Store, tenant_id: str) -> TenantChange:
    return manager.add(tenant_id, _trained(manager, store, tenant_id))


def update_tenant(manager: Manager, store: Store, tenant_id: str) -> TenantChange:
    return manager.update(tenant_id, _trained(manager, store, tenant_id))


class Trained:
    """The newest versions of a store's tenants, for a change of many of them. `version`: another one."""

    def __init__(self, manager: Manager, store: Store, tenant_ids: Iterable[str], version: int | None = None) -> None:
        _check_store(manager, store)
        self._manager, self._store, branches = manager, store, manager.current().branches
        for tenant_id in tenant_ids:
            if version is not None and version not in (known := store.tenant_versions(tenant_id)):
                raise InvalidInput(f"tenant {tenant_id!r} has no version {version} in {store.folder}, but {some(known)}")
        of = store.tenant if version is None else partial(store.tenant_version, version=version)
        found = [of(tenant_id) for tenant_id in tenant_ids]
        self._tenants = {tenant.id: tenant for tenant in found if tenant is not None}
        for domain, version in {(tenant.domain, tenant.domain_version) for tenant in self._tenants.values()}:
            _check_same(manager, store, branches, domain, version)
        self.newest = {tenant.id: tenant.version for tenant in self._tenants.values()}

    def publish(self, change: Change, tenant_id: str) -> None:
        self._manager.put(change, tenant_id, self._knowledge(tenant_id))

    def publish_all(self, served_as: str | None = None, keys: Sequence[Key] = ()) -> Published:
        """Serves them in one change, whether they are served already or not. `served_as`: another name, of one of them."""
        wanted = {served_as or tenant_id: partial(self._knowledge, tenant_id) for tenant_id in self.newest}
        return self._manager.publish(wanted, keys)

    def _knowledge(self, tenant_id: str) -> TenantKnowledge:
        return self._store.knowledge(self._tenants[tenant_id])


def add_domain(manager: Manager, store: Store, name: str) -> DomainChange:
    """Serves a new domain and its ancestors. Its tenants are added one by one."""
    _check_store(manager, store)
    _check_new(manager.current(), name)
    version = store.latest(name)
    kept = _written(manager, store, manager.current(), name, version)

    def edit(change: Change) -> DomainChange:
        _check_new(change, name)
        _bring(manager, store, change, name, version)
        return manager.close(change, DomainChange(change.generation, name, version))

    return manager.registry.change("domain add", edit, kept)


def update_domain(manager: Manager, store: Store, name: str, share: float = 1.0) -> DomainChange:
    """Serves a domain's newest version, and moves this share of the tenants trained on it, always the same ones first."""
    if not 0 < share <= 1:
        raise InvalidInput(f"canary {share}: give a share above 0, at most 1")
    _check_store(manager, store)
    version, served = store.latest(name), manager.current()
    _check_not_older(store, name, version, newest_version(served, name))
    on_newest = [tenant for tenant in store.readable_tenants() if (tenant.domain, tenant.domain_version) == (name, version)]
    tuned = {tenant.id: tenant for tenant in on_newest}
    kept = _written(manager, store, served, name, version)

    def edit(change: Change) -> DomainChange:
        here = newest_version(change, name)
        _check_not_older(store, name, version, here)
        _bring(manager, store, change, name, version)
        mine = [tenant for tenant in change.tenants.values() if tenant.domain == name and tenant.domain_version < version]
        # In a random order, which is the same every time.
        ready = sorted((own for own in mine if own.id in tuned), key=lambda own: hashlib.sha256(own.id.encode()).digest())
        on_it = sum(tenant.branch_id == (name, version) for tenant in change.tenants.values())
        going = ready[: max(0, max(1, round(share * (len(ready) + on_it))) - on_it)]
        for tenant in going:
            manager.put(change, tenant.id, store.knowledge(tuned[tenant.id]))
        gone = {tenant.id for tenant in going}
        done = DomainChange(
            generation=change.generation,
            domain=name,
            version=version,
            moved=sorted(gone),
            waiting=sorted(tenant.id for tenant in ready if tenant.id not in gone),
            behind=sorted(tenant.id for tenant in mine if tenant.id not in tuned),
        )
        if version == here and done.waiting and not going:
            raise InvalidInput(
                f"version {version} of domain {name!r} is served and {on_it} tenants are on it, which is a canary of "
                f"{share:g}; {len(done.waiting)} wait: give a larger --canary, or none"
            )
        if version == here and not going:
            raise InvalidInput(
                f"version {version} of domain {name!r} is served and no tenant waits to move to it; "
                f"behind are {', '.join(done.behind) or 'none'}: tune them again with `hplm build tenant`"
            )
        return manager.close(change, done)

    return manager.registry.change("domain update", edit, kept)


def _trained(manager: Manager, store: Store, tenant_id: str) -> TenantKnowledge:
    _check_store(manager, store)
    found = store.known_tenant(tenant_id)
    _check_same(manager, store, manager.current().branches, found.domain, found.domain_version)
    return store.knowledge(found)


def _check_same(manager: Manager, store: Store, branches: Sequence[Branch], domain: str, version: int) -> None:
    """Refuses if the served table of this version is not the store's: the tenant was trained on another table."""
    served = next((branch for branch in branches if branch.id == (domain, version)), None)
    if served is not None and not manager.tables.is_same(served, store.table(domain, version)):
        raise InvalidInput(
            f"version {version} of domain {domain!r} is served and {store.folder} has another table of that number: "
            "build its next version with `hplm domain update --corpus`"
        )


def _check_store(manager: Manager, store: Store) -> None:
    """Refuses a store with other upper layers: its tables and tenants do not fit this export."""
    folder = manager.folder
    same = store.config.name == folder.parent.name and filecmp.cmp(
        store.folder / "upper.safetensors", folder / Backbone.UPPER, shallow=False
    )
    if not same:
        raise InvalidInput(f"{folder} was exported from another store than {store.folder}: name the one it came from")


def _written(manager: Manager, store: Store, served: Snapshot, name: str, version: int) -> ChangeFiles:
    """Writes the table and those it falls back to into the registry, unless they are served."""
    kept = ChangeFiles(manager.registry.store)
    for table in list(_missing(manager, store, served, name, version)):
        kept.table(table)
    return kept


def _bring(manager: Manager, store: Store, change: Change, name: str, version: int) -> None:
    """Adds the table and those it falls back to, unless they are served."""
    for table in list(_missing(manager, store, change, name, version)):
        change.add_branch(table.meta.domain, table.meta.version, change.kept.table(table), table.size)


def _missing(manager: Manager, store: Store, served: Snapshot | Change, name: str, version: int) -> Iterator[Table]:
    """Yields the table and those it falls back to, unless they are served."""
    here = {branch.id for branch in served.branches}
    for step in store.chain(name, version):
        if step in here:
            _check_same(manager, store, served.branches, *step)
            return
        yield store.table(*step)


def _check_new(served: Snapshot | Change, name: str) -> None:
    if name in {branch.domain for branch in served.branches}:
        raise InvalidInput(f"domain {name!r} is served already: `hplm domain update` brings its next version")


def _check_not_older(store: Store, name: str, version: int, here: int) -> None:
    if version < here:
        raise InvalidInput(
            f"version {here} of domain {name!r} is served and {store.folder} has {version}: name the store it came from"
        )
