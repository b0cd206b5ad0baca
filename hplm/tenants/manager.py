"""Changes the served tenants and domains: adds, updates, rolls back and deletes them. Each change is one generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hplm.clock import Clock
from hplm.errors import Broken, HplmError, InvalidInput, OutOfCapacity, some
from hplm.location import Location
from hplm.registry.opening import opened
from hplm.registry.store import Away, Busy, Denied
from hplm.tasks.answers import EMBEDDING
from hplm.tenants.change import Change
from hplm.tenants.keys import Key, expiry, further, new_key, without
from hplm.tenants.models import has_output
from hplm.tenants.quotas import check_limits
from hplm.tenants.registry_writer import Registry
from hplm.tenants.snapshot import Snapshot, Tenant
from hplm.tenants.state_folder import EXPORTED_TENANTS, StateFolder, named_folders
from hplm.tenants.tables import Tables, newest_version

if TYPE_CHECKING:
    from hplm.tenants.knowledge import TenantKnowledge

log = logging.getLogger(__name__)
Done = TypeVar("Done", "TenantChange", "DomainChange")


@dataclass(frozen=True)
class TenantChange:
    generation: int
    tenant: str
    before: int | None  # version
    after: int | None


@dataclass(frozen=True)
class Published:
    generation: int
    tenants: Sequence[TenantChange]  # also those whose served version has the same content
    refused: Mapping[str, str]  # why, by tenant
    keys: Mapping[str, Sequence[str]]  # ids of the keys that tenants have got


@dataclass(frozen=True)
class DomainChange:
    generation: int
    domain: str
    version: int
    moved: Sequence[str] = ()
    waiting: Sequence[str] = ()  # tenants that were tuned again, but are held back by the canary share
    behind: Sequence[str] = ()  # tenants on an older version that were not tuned again
    removed: Sequence[str] = ()  # tables that no tenant needs any more


class Manager:
    """The manager of one exported backbone (`model_repository/<backbone>/1`) and the registry that it is served with."""

    def __init__(self, folder: Path, state: Location, clock: Clock = time) -> None:
        self.folder = folder
        self.exported = Snapshot.load(folder / EXPORTED_TENANTS)
        place = state / folder.parent.name
        self.state = StateFolder(place, clock) if isinstance(place, Path) else None  # there servers say what they have taken
        self.registry = Registry(opened(place, clock), self.exported, clock)
        self.tables = Tables(folder, self.registry.store)

    @classmethod
    def open(cls, repository: Path, state: Location, backbone: str | None = None, clock: Clock = time) -> Manager:
        """Opens the manager of the named backbone, or of the repository's only one."""
        return cls(exported_folder(repository, backbone), state, clock)

    def current(self) -> Snapshot:
        """Returns the snapshot that readers see now. Writes nothing."""
        return self.registry.current()

    def add(self, tenant_id: str, knowledge: TenantKnowledge) -> TenantChange:
        def edit(change: Change) -> TenantChange:
            if tenant_id in change.tenants:
                raise InvalidInput(f"tenant {tenant_id!r} is served already: add a version with `hplm tenant update`")
            return self.put(change, tenant_id, knowledge)

        return self.registry.change("tenant add", edit)

    def update(self, tenant_id: str, knowledge: TenantKnowledge) -> TenantChange:
        """Adds a tenant's next version. `roll_back` returns to the version before."""

        def edit(change: Change) -> TenantChange:
            _known(change, tenant_id)
            return self.put(change, tenant_id, knowledge)

        return self.registry.change("tenant update", edit)

    def publish(self, wanted: Mapping[str, Callable[[], TenantKnowledge]], keys: Sequence[Key] = ()) -> Published:
        """Adds tenants, or their next versions if they are served, in one change. A tenant that is refused holds up no other.

        Changes nothing if the served versions have the same content and these keys. `wanted`: reads what a tenant knows, by id.
        """

        def edit(change: Change) -> Published:
            done, refused, made = list[TenantChange](), dict[str, str](), dict[str, list[str]]()
            for tenant_id, read in wanted.items():
                served = change.tenants.get(tenant_id)
                try:
                    knowledge = read()
                    if served is not None and knowledge.is_of(served):
                        done.append(TenantChange(change.generation, tenant_id, served.version, served.version))
                    else:
                        done.append(self.put(change, tenant_id, knowledge))
                except (InvalidInput, Broken) as error:
                    refused[tenant_id] = str(error)
                    continue
                tenant = change.tenants[tenant_id]
                if new := further(tenant.keys, keys):
                    change.tenants[tenant_id] = replace(tenant, keys=(*tenant.keys, *new))
                    made[tenant_id] = [key.id for key in new]
            changed = [one.tenant for one in done if one.before != one.after or one.tenant in made]
            change.is_empty = not changed
            if len(changed) > 1:
                change.details = {"tenants": changed}
            elif made:
                change.details = {"tenant": changed[0], **change.details, "keys": made[changed[0]]}
            generation = change.generation - change.is_empty
            return Published(generation, [replace(one, generation=generation) for one in done], refused, made)

        return self.registry.change("tenant publish", edit)

    def put(self, change: Change, tenant_id: str, knowledge: TenantKnowledge) -> TenantChange:
        """Writes a tenant's first or next version, within a change."""
        knowledge.check(tenant_id, change.branches, self._width)
        if knowledge.embedding is not None and not has_output(self.folder.parent, EMBEDDING):
            raise InvalidInput(
                f"tenant {tenant_id!r} answers with {EMBEDDING}, and {self.folder.parent} was exported by an earlier release, "
                "without that output: write its configurations again by `hplm export --settings-only`, and restart its servers"
            )
        before = change.tenants.get(tenant_id)
        if before is not None and not _keeps(knowledge, before):
            named = "labels" if before.embedding is None else "dimensions"
            raise InvalidInput(
                f"tenant {tenant_id!r} has the task {before.task} with {before.outputs} {named}, on which its clients rely. An "
                "update keeps them, and may add labels behind them: add a tenant with another name, or go back to an earlier "
                "version with `hplm tenant rollback`"
            )
        uid = before.uid if before is not None else change.new_uid()
        version = max(change.next_version(tenant_id), knowledge.version)  # the store's version, unless it was already used
        tenant = knowledge.tenant(tenant_id, uid, version, change.kept.of((tenant_id, knowledge.version), knowledge.packed))
        if before is not None:
            tenant = tenant.set_as(before)
        change.put(tenant)
        return _recorded(change, TenantChange(change.generation, tenant_id, before.version if before else None, version))

    def roll_back(self, tenant_id: str) -> TenantChange:
        def edit(change: Change) -> TenantChange:
            now = _known(change, tenant_id)
            if tenant_id not in change.before:
                raise InvalidInput(f"tenant {tenant_id!r} cannot be rolled back: it has no version before {now.version}")
            then = change.roll_back(tenant_id)
            return _recorded(change, TenantChange(change.generation, tenant_id, now.version, then.version))

        return self.registry.change("tenant rollback", edit)

    def delete(self, tenant_id: str) -> TenantChange:
        """Deletes a tenant. Its requests are refused, and its weights leave the disk with a change after a minute."""

        def edit(change: Change) -> TenantChange:
            gone = _known(change, tenant_id)
            change.remove_tenant(tenant_id)
            return _recorded(change, TenantChange(change.generation, tenant_id, gone.version, None))

        return self.registry.change("tenant delete", edit)

    def add_key(self, tenant_id: str, days: float = 0) -> tuple[str, Key]:
        """Returns the secret and the key. The secret is not stored, so nobody can read it later."""
        secret, key = new_key(expiry(days))

        def edit(change: Change) -> None:
            tenant = _known(change, tenant_id)
            change.tenants[tenant_id] = replace(tenant, keys=(*tenant.keys, key))
            change.details = {"tenant": tenant_id, "key": key.id}

        self.registry.change("tenant key add", edit)
        return secret, key

    def revoke_key(self, tenant_id: str, key_id: str) -> float:
        """Returns when the key opens nothing any more, also at a server that is cut off (Unix time)."""

        def edit(change: Change) -> None:
            tenant = _known(change, tenant_id)
            change.tenants[tenant_id] = replace(tenant, keys=without(tenant.keys, key_id, tenant_id))
            change.details = {"tenant": tenant_id, "key": key_id}

        try:
            pointer = self.registry.pointer()  # before: what fails after the change would hide that it is made
            self.registry.change("tenant key revoke", edit)
        except (Away, Busy, Denied, OutOfCapacity, OSError) as error:
            kind = type(error) if isinstance(error, HplmError) else HplmError
            opens = "may still open" if isinstance(error, Away | OSError) else "still opens"
            raise kind(f"{error}. The key {key_id!r} {opens} tenant {tenant_id!r}: revoke it again") from error
        return max(time.time() + pointer.lease_s, pointer.lease_until)

    def limit(self, tenant_id: str, **limits: float) -> Tenant:
        """Sets a tenant's quotas, homes and default deadline."""
        check_limits(limits)

        def edit(change: Change) -> Tenant:
            tenant = _known(change, tenant_id)
            change.tenants[tenant_id] = replace(tenant, **limits)
            change.details = {"tenant": tenant_id, **limits}
            return change.tenants[tenant_id]

        return self.registry.change("tenant limit", edit)

    def compact(self) -> int:
        """Removes the weights of deleted tenants and versions now, and not with a later change. Returns the freed bytes."""
        return self.registry.collect()

    def roll_back_domain(self, name: str) -> DomainChange:
        """Rolls back all tenants of the newest version to the older version that they had before."""

        def edit(change: Change) -> DomainChange:
            version = newest_version(change, name)
            back = [
                tenant_id
                for tenant_id, before in change.before.items()
                if before.domain == name
                and before.domain_version < version
                and (tenant := change.tenants.get(tenant_id)) is not None
                and tenant.branch_id == (name, version)
            ]
            if not back:
                raise InvalidInput(f"domain {name!r} cannot be rolled back: none of its tenants has an older version")
            to = {change.roll_back(tenant_id).domain_version for tenant_id in back}
            return self.close(change, DomainChange(change.generation, name, max(to), sorted(back)))

        return self.registry.change("domain rollback", edit)

    def delete_domain(self, name: str) -> DomainChange:
        def edit(change: Change) -> DomainChange:
            version = newest_version(change, name)
            if name == "root":
                raise InvalidInput("the root cannot be deleted, because all domains fall back to it: name another domain")
            users = [f"tenant {tenant.id}" for tenant in change.tenants.values() if tenant.domain == name]
            for branch in change.branches:
                if branch.domain != name and self.tables.meta(branch).parent == name:
                    users.append(f"domain {branch.domain} version {branch.version}")
            if users:
                raise InvalidInput(f"domain {name!r} is in use by {some(sorted(users))}: delete those first")
            change.branches = [branch for branch in change.branches if branch.domain != name]
            change.before = {tenant_id: before for tenant_id, before in change.before.items() if before.domain != name}
            return self.close(change, DomainChange(change.generation, name, version))

        return self.registry.change("domain delete", edit)

    def close(self, change: Change, done: DomainChange) -> DomainChange:
        """Removes the tables that no tenant needs from the snapshot, and records the change."""
        removed = self.tables.unneeded(change)
        change.branches = [branch for branch in change.branches if branch not in removed]
        return _recorded(change, replace(done, removed=sorted(f"{branch.domain}/{branch.version}" for branch in removed)))

    def settle(self) -> list[str]:
        """Waits until every server that reads this folder has this manager's last change. Returns those that have not.

        Servers of a bucket look each second, and nobody waits for them.
        """
        if self.state is None:
            return []
        try:
            return self.state.wait_for_readers(self.registry.decided)
        except OSError as error:  # the change is made, and its result (such as a new key) must not be lost
            log.warning("cannot read which servers have taken generation %d: %s", self.registry.decided, error)
            return []

    @cached_property
    def _width(self) -> int | None:
        """The width of the exported tenants' vectors; None if no exported tenant has a head or an adapter."""
        from hplm.adapters.layout import Layout  # imports torch, which changes of keys and limits do not need

        served = next((record for tenant in self.exported.tenants for record in tenant.records()), None)
        return Layout.of(served.layout).hidden if served is not None else None


def exported_folder(repository: Path, backbone: str | None = None) -> Path:
    """Returns the folder of the named backbone, or of the repository's only one."""
    found = named_folders(repository, backbone)
    if len(found) > 1:
        which = ", ".join(folder.parent.name for folder in found)
        raise InvalidInput(f"{repository} contains {len(found)} backbones ({which}): name one of them with --backbone")
    return found[0]


def _keeps(new: TenantKnowledge, before: Tenant) -> bool:
    """Returns whether a next version has all that clients rely on. Behind its labels there may be new ones."""
    dimensions = (own.embedding and own.embedding.dimensions for own in (new, before))
    return new.task == before.task and new.labels[: len(before.labels)] == before.labels and len({*dimensions}) == 1


def _known(change: Change, tenant_id: str) -> Tenant:
    if tenant_id not in change.tenants:
        raise InvalidInput(f"tenant {tenant_id!r} is not served: `hplm tenant list` lists all tenants")
    return change.tenants[tenant_id]


def _recorded(change: Change, done: Done) -> Done:
    """Records a change for the audit log."""
    change.details = {name: value for name, value in asdict(done).items() if name != "generation"}
    return done
