"""Changes the served tenants and domains: adds, updates, rolls back and deletes them. Each change is one generation."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from hplm.adapters.bank import Bank
from hplm.adapters.heads import grown, size_for
from hplm.adapters.record import Record
from hplm.errors import InvalidInput
from hplm.plot.table import Table, TableMeta
from hplm.tenants.banks import Banks
from hplm.tenants.exits import Exits
from hplm.tenants.keys import Key, expiry, new_key, without
from hplm.tenants.knowledge import Adapter, ExitKnowledge, Head, Knowledge
from hplm.tenants.quotas import check_limits
from hplm.tenants.registry import Change, Registry
from hplm.tenants.snapshot import PROMISES, Snapshot, Tenant
from hplm.tenants.state import (
    EXPORTED_BANKS,
    EXPORTED_TABLES,
    EXPORTED_TENANTS,
    State,
)
from hplm.tenants.tables import Tables, newest_version

log = logging.getLogger(__name__)
Done = TypeVar("Done", "TenantChange", "DomainChange")


@dataclass(frozen=True)
class TenantChange:
    generation: int
    tenant: str
    before: int | None  # version
    after: int | None


@dataclass(frozen=True)
class DomainChange:
    generation: int
    domain: str
    version: int
    moved: list[str]
    waiting: list[str]  # tenants that were tuned again, but are held back by the canary share
    behind: list[str]  # tenants on an older version that were not tuned again
    removed: list[str]  # tables that no tenant needs any more


class Manager:
    """The manager of one exported backbone (`model_repository/<backbone>/1`) and the state that it is served with."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self.exported = Snapshot.load(folder / EXPORTED_TENANTS)
        self.state = State(state / folder.parent.name)
        self.tables = Tables(folder, self.state)
        self.banks = Banks(self.state)
        last = max(self.exported.branches, key=lambda branch: branch.base)
        free = last.base + TableMeta.load(folder / EXPORTED_TABLES / last.folder / "meta.json").rows
        last_uid = max((tenant.uid for tenant in self.exported.tenants), default=0)
        self.registry = Registry(self.state, self.exported, free, last_uid + 1)

    @classmethod
    def open(cls, repository: Path, state: Path, backbone: str | None = None) -> Manager:
        """Opens the manager of the named backbone, or of the repository's only one."""
        return cls(exported_folder(repository, backbone), state)

    def current(self) -> Snapshot:
        """Returns the snapshot that readers see now. Writes nothing."""
        generation = self.state.current()
        return self.state.load(generation) if generation else self.exported

    def add(self, tenant_id: str, knowledge: Knowledge) -> TenantChange:
        with self.registry.change("tenant add") as change:
            if tenant_id in change.tenants:
                raise InvalidInput(f"tenant {tenant_id!r} is served already: add a version with `hplm tenant update`")
            return self.put(change, tenant_id, knowledge)

    def update(self, tenant_id: str, knowledge: Knowledge) -> TenantChange:
        """Adds a tenant's next version. `roll_back` returns to the version before."""
        with self.registry.change("tenant update") as change:
            _known(change, tenant_id)
            return self.put(change, tenant_id, knowledge)

    def put(self, change: Change, tenant_id: str, knowledge: Knowledge) -> TenantChange:
        """Writes a tenant's first or next version, within a change."""
        knowledge.check(tenant_id, change.branches, self._width)
        before = change.tenants.get(tenant_id)
        if before is not None and (knowledge.task, knowledge.labels) != (before.task, before.labels):
            raise InvalidInput(
                f"tenant {tenant_id!r} has the task {before.task} with {len(before.labels)} labels. An update cannot change "
                "them, because its clients rely on them: add a tenant with another name"
            )
        uid = before.uid if before is not None else change.new_uid()
        version = max(change.next_version(tenant_id), knowledge.version)  # the store's version, unless it was already used
        head, adapter = self._write(change, uid, version, knowledge.head, knowledge.adapter)
        domain, domain_version = knowledge.domain, knowledge.domain_version
        if before is None:
            task, labels = knowledge.task, knowledge.labels
            tenant = Tenant(tenant_id, uid, version, domain, domain_version, task, labels, head, adapter)
        else:  # it keeps its task and labels, its keys and its limits
            tenant = replace(before, version=version, domain=domain, domain_version=domain_version, head=head, adapter=adapter)
        stored = knowledge.version if knowledge.version != version else 0
        exits = self._write_exits(change, uid, version, knowledge.exits)
        change.put(replace(tenant, calibration=knowledge.calibration, exits=exits, stored=stored))
        return _recorded(change, TenantChange(change.generation, tenant_id, before.version if before else None, version))

    def _write(
        self, change: Change, uid: int, version: int, head: Head | None, adapter: Adapter | None
    ) -> tuple[Record | None, Record | None]:
        """Writes a head and an adapter into banks. Returns their records."""
        head_record = adapter_record = None
        if head is not None:
            layout, weights = head
            size = size_for(layout.size)
            head_record = self.banks.put(change, replace(layout, size=size), uid, version, [grown(weights, size)])
        if adapter is not None:
            adapter_record = self.banks.put(change, adapter[0], uid, version, adapter[1])
        return head_record, adapter_record

    def _write_exits(self, change: Change, uid: int, version: int, found: ExitKnowledge | None) -> Exits | None:
        if found is None:
            return None
        size = size_for(found.layout.size)
        heads = [grown(head, size) for head in found.heads]
        return replace(found.exits, record=self.banks.put(change, replace(found.layout, size=size), uid, version, heads))

    def roll_back(self, tenant_id: str) -> TenantChange:
        with self.registry.change("tenant rollback") as change:
            now = _known(change, tenant_id)
            if tenant_id not in change.before:
                raise InvalidInput(f"tenant {tenant_id!r} cannot be rolled back: it has no version before {now.version}")
            then = change.roll_back(tenant_id)
            return _recorded(change, TenantChange(change.generation, tenant_id, now.version, then.version))

    def delete(self, tenant_id: str) -> TenantChange:
        """Deletes a tenant. Its requests are refused; a later tenant or `compact` overwrites its bytes."""
        with self.registry.change("tenant delete") as change:
            gone = _known(change, tenant_id)
            change.remove(tenant_id)
            return _recorded(change, TenantChange(change.generation, tenant_id, gone.version, None))

    def add_key(self, tenant_id: str, days: float = 0) -> tuple[str, Key]:
        """Returns the secret and the key. The secret is not stored, so nobody can read it later."""
        secret, key = new_key(expiry(days))
        with self.registry.change("tenant key add") as change:
            tenant = _known(change, tenant_id)
            change.replace(replace(tenant, keys=(*tenant.keys, key)))
            change.details = {"tenant": tenant_id, "key": key.id}
        return secret, key

    def revoke_key(self, tenant_id: str, key_id: str) -> None:
        with self.registry.change("tenant key revoke") as change:
            tenant = _known(change, tenant_id)
            change.replace(replace(tenant, keys=without(tenant.keys, key_id, tenant_id)))
            change.details = {"tenant": tenant_id, "key": key_id}

    def limit(self, tenant_id: str, **limits: float) -> Tenant:
        """Sets a tenant's quotas, homes and default deadline and, if it generates text, the times that its tokens may take."""
        check_limits(limits)
        with self.registry.change("tenant limit") as change:
            tenant = _known(change, tenant_id)
            promises = [name for name in PROMISES if name in limits]
            if promises and not tenant.task_object.generates:
                raise InvalidInput(
                    f"tenant {tenant_id!r} has the task {tenant.task}, and its answers have no tokens: {promises[0]!r} is only "
                    "for tenants that generate text; give 'deadline_us' for whole answers"
                )
            tenant = replace(tenant, **limits)
            change.replace(tenant)
            change.details = {"tenant": tenant_id, **limits}
        return tenant

    def compact(self) -> int:
        """Copies all records in use into new banks without holes. Returns the bytes that this frees."""
        with self.registry.change("compact") as change:
            before = self.banks.size()
            change.details = {"records": self.banks.compact(change)}
        return max(0, before - self.banks.size())

    def adopt_domain(self, name: str, version: int, source: Path) -> DomainChange:
        """Copies a table's folder into the state and serves it. The tables that it falls back to must be served."""
        self.tables.check_arrival(name, version, source, self.registry.current().branches)
        self.tables.refuse_another(Table(source))
        with self.state.aside() as aside:
            copy = self.tables.copy(source, aside)
            # After the copy, which takes minutes: other managers wait during a change.
            with self.registry.change("domain add") as change:
                self.tables.check_arrival(name, version, source, change.branches)
                self.tables.take(change, copy)
                return self.close(change, DomainChange(change.generation, name, version, [], [], [], []))

    def roll_back_domain(self, name: str) -> DomainChange:
        """Rolls back all tenants of the newest version to the older version that they had before."""
        with self.registry.change("domain rollback") as change:
            version = newest_version(change, name)
            back = [
                tenant_id
                for tenant_id, before in change.before.items()
                if before.domain == name
                and before.domain_version < version
                and (tenant := change.tenants.get(tenant_id)) is not None
                and (tenant.domain, tenant.domain_version) == (name, version)
            ]
            if not back:
                raise InvalidInput(f"domain {name!r} cannot be rolled back: none of its tenants has an older version")
            to = {change.roll_back(tenant_id).domain_version for tenant_id in back}
            return self.close(change, DomainChange(change.generation, name, max(to), sorted(back), [], [], []))

    def delete_domain(self, name: str) -> DomainChange:
        with self.registry.change("domain delete") as change:
            version = newest_version(change, name)
            if name == "root":
                raise InvalidInput("the root cannot be deleted, because all domains fall back to it: name another domain")
            users = [f"tenant {tenant.id}" for tenant in change.tenants.values() if tenant.domain == name]
            for branch in change.branches:
                if branch.domain != name and self.tables.open(branch.domain, branch.version).meta.parent == name:
                    users.append(f"domain {branch.domain} version {branch.version}")
            if users:
                more = f" and {len(users) - 5} more" if len(users) > 5 else ""
                raise InvalidInput(f"domain {name!r} is in use by {', '.join(sorted(users)[:5])}{more}: delete those first")
            change.branches = [branch for branch in change.branches if branch.domain != name]
            for tenant_id in [tenant_id for tenant_id, before in change.before.items() if before.domain == name]:
                change.forget(tenant_id)
            return self.close(change, DomainChange(change.generation, name, version, [], [], [], []))

    def close(self, change: Change, done: DomainChange) -> DomainChange:
        """Removes the tables that no tenant needs from the snapshot, and records the change."""
        removed = self.tables.unneeded(change)
        change.branches = [branch for branch in change.branches if branch not in removed]
        return _recorded(change, replace(done, removed=sorted(branch.folder for branch in removed)))

    def settle(self, generation: int, removes: bool = False) -> list[str]:
        """Waits until every reader has taken the generation. Returns the readers that have not taken it within ten seconds.

        `removes`: the change only took something away: a tenant, a key, what a limit allowed. Followers do that at once.
        """
        if self.state.current() < generation:  # decided, but not yet published
            self.registry.finish()
        try:
            return self.state.wait_for_readers(generation, removes)
        except OSError as error:  # the change is made, and its result (such as a new key) must not be lost
            log.warning("cannot read which servers have taken generation %d: %s", generation, error)
            return []

    def settle_now(self, removes: bool = False) -> list[str]:
        """Waits for the last change that this manager made."""
        return self.settle(self.registry.decided, removes)

    @cached_property
    def _width(self) -> int | None:
        """The width of the exported tenants' vectors; None if no exported tenant has a head or an adapter."""
        served = next((record for tenant in self.exported.tenants for record in tenant.records()), None)
        return Bank(self.folder / EXPORTED_BANKS / served.bank).layout.hidden if served is not None else None


def exported_folder(repository: Path, backbone: str | None = None) -> Path:
    """Returns the folder of the named backbone, or of the repository's only one."""
    found = sorted(repository.glob(f"{backbone or '*'}/1/{EXPORTED_TENANTS}"))
    if len(found) != 1:
        which = ", ".join(path.parent.parent.name for path in found) or "none"
        raise InvalidInput(f"{repository} contains {len(found)} backbones ({which}): name one of them with --backbone")
    return found[0].parent


def _known(change: Change, tenant_id: str) -> Tenant:
    if tenant_id not in change.tenants:
        raise InvalidInput(f"tenant {tenant_id!r} is not served: `hplm tenant list` lists all tenants")
    return change.tenants[tenant_id]


def _recorded(change: Change, done: Done) -> Done:
    """Records a change for the audit log."""
    change.details = {name: value for name, value in asdict(done).items() if name != "generation"}
    return done
