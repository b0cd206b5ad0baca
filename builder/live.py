"""Domains of a repository that is being served: what a store has learned since is put into its live state, or taken out again.

A tenant is pinned to the table version it was trained on. So a new version of a domain comes with the tenants that were tuned
again on it; those that were not stay where they are, and are said to be behind.
"""

from __future__ import annotations

import filecmp
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from builder.export import copy_file
from builder.records import Records
from builder.store import Store, TenantFile, written_folder
from hplm.engine.backbone import Backbone
from hplm.errors import InvalidInput
from hplm.plot.table import Table, TableMeta
from hplm.tenants.registry import Change, Registry
from hplm.tenants.snapshot import LIVE, Snapshot, Tenant
from hplm.tenants.state import State


@dataclass(frozen=True)
class Moved:
    """What a change of a domain did to its tenants."""

    generation: int
    domain: str
    version: int
    moved: list[str]
    waiting: list[str]  # tuned again, and held back by the canary share
    behind: list[str]  # still on an older version, and not tuned again
    removed: list[str]  # tables that nobody stands on any more


@dataclass(frozen=True)
class Live:
    """A repository's backbone and the state it is served with."""

    folder: Path  # model_repository/<backbone>/1
    exported: Snapshot
    state: State
    registry: Registry

    @classmethod
    def open(cls, repository: Path, state: Path, backbone: str | None = None) -> Live:
        folder = _folder(repository, backbone)
        exported = Snapshot.load(folder / Backbone.TENANTS)
        live = State(state / folder.parent.name)
        tables = folder / Backbone.TABLES
        last = max(exported.branches, key=lambda branch: branch.base)
        free = last.base + TableMeta.load(tables / last.folder / "meta.json").rows
        return cls(folder, exported, live, Registry(live, exported, free))

    def current(self) -> Snapshot:
        """What readers see now; nothing is written."""
        generation = self.state.current()
        return self.state.load(generation) if generation else self.exported

    def table(self, domain: str, version: int) -> Table:
        for folder in (self.folder / Backbone.TABLES, self.state.tables):
            if (folder / domain / str(version)).is_dir():
                return Table(folder / domain / str(version))
        raise InvalidInput(f"table {domain}/{version} is neither in {self.folder} nor in {self.state.folder}")

    def add(self, store: Store, name: str) -> Moved:
        """A domain that is new here, its ancestors with it. Its tenants come by themselves."""
        self._check(store)
        with self.registry.change("domain add") as change:
            if name in {branch.domain for branch in change.branches}:
                raise InvalidInput(f"domain {name!r} is served already: `hplm domain update` brings its next version")
            version = store.latest(name)
            self._bring(store, change, name, version)
            return self._close(change, Moved(change.generation, name, version, [], [], [], []))

    def update(self, store: Store, name: str, share: float = 1.0) -> Moved:
        """The store's newest version, and of the tenants that were tuned on it this share, always the same ones first."""
        if not 0 < share <= 1:
            raise InvalidInput(f"canary {share}: a share above 0, at most 1")
        self._check(store)
        with self.registry.change("domain update") as change:
            here = _newest(change, name)
            version = store.latest(name)
            if version < here:
                raise InvalidInput(
                    f"version {here} of domain {name!r} is served and {store.folder} has {version}: name the store it came from"
                )
            self._bring(store, change, name, version)
            mine = [tenant for tenant in change.tenants.values() if tenant.domain == name and tenant.domain_version < version]
            on_newest = [tenant for tenant in store.tenants() if (tenant.domain, tenant.domain_version) == (name, version)]
            tuned = {tenant.id: tenant for tenant in on_newest}
            ready = sorted((tenant for tenant in mine if tenant.id in tuned), key=_canary_order)
            on_it = sum((tenant.domain, tenant.domain_version) == (name, version) for tenant in change.tenants.values())
            going = ready[: max(0, round(share * (len(ready) + on_it)) - on_it)] if share < 1 else ready
            self._move(store, change, [tuned[tenant.id] for tenant in going])
            gone = {tenant.id for tenant in going}
            moved = Moved(
                generation=change.generation,
                domain=name,
                version=version,
                moved=sorted(gone),
                waiting=sorted(tenant.id for tenant in ready if tenant.id not in gone),
                behind=sorted(tenant.id for tenant in mine if tenant.id not in tuned),
                removed=[],
            )
            if version == here and not going:
                raise InvalidInput(
                    f"version {version} of domain {name!r} is served and no tenant waits to move to it; "
                    f"behind are {', '.join(moved.behind) or 'none'}: tune them again with `hplm build tenant`"
                )
            return self._close(change, moved)

    def roll_back(self, name: str) -> Moved:
        """Tenants of the newest version that came from an older one go back to it, as they were."""
        with self.registry.change("domain rollback") as change:
            version = _newest(change, name)
            back = [
                tenant_id
                for tenant_id, before in change.before.items()
                if before.domain == name
                and before.domain_version < version
                and (tenant := change.tenants.get(tenant_id)) is not None
                and (tenant.domain, tenant.domain_version) == (name, version)
            ]
            if not back:
                raise InvalidInput(f"no tenant of domain {name!r} has a version to go back to")
            to = {change.roll_back(tenant_id).domain_version for tenant_id in back}
            return self._close(change, Moved(change.generation, name, max(to), sorted(back), [], [], []))

    def delete(self, name: str) -> Moved:
        with self.registry.change("domain delete") as change:
            version = _newest(change, name)
            users = [f"tenant {tenant.id}" for tenant in change.tenants.values() if tenant.domain == name]
            for branch in change.branches:
                meta = self.table(branch.domain, branch.version).meta
                if meta.parent == name and branch.domain != name:
                    users.append(f"domain {branch.domain} version {branch.version}")
            if name == "root":
                raise InvalidInput("everything falls back to the root: it cannot be deleted")
            if users:
                more = f" and {len(users) - 5} more" if len(users) > 5 else ""
                raise InvalidInput(f"domain {name!r} is in use by {', '.join(sorted(users)[:5])}{more}: delete those first")
            change.branches = [branch for branch in change.branches if branch.domain != name]
            for tenant_id in [tenant_id for tenant_id, before in change.before.items() if before.domain == name]:
                del change.before[tenant_id]
            return self._close(change, Moved(change.generation, name, version, [], [], [], []))

    def _check(self, store: Store) -> None:
        """Tables and tenants of one store mean nothing to another's upper layers."""
        same = store.config.name == self.folder.parent.name and filecmp.cmp(
            store.folder / "upper.safetensors", self.folder / Backbone.UPPER, shallow=False
        )
        if not same:
            raise InvalidInput(f"{self.folder} was exported from another store than {store.folder}: name the one it came from")

    def _bring(self, store: Store, change: Change, name: str, version: int) -> None:
        """The table and those it falls back to, where they are not here."""
        step: tuple[str | None, int | None] = (name, version)
        here = {(branch.domain, branch.version) for branch in change.branches}
        while step[0] is not None:
            table = store.table(*step)
            if step in here:
                if self.table(*step).meta != table.meta:
                    raise InvalidInput(
                        f"version {step[1]} of domain {step[0]!r} is served and {store.folder} has another table of that "
                        "number: build its next version with `hplm domain update --corpus`"
                    )
                return
            target = self.state.tables / step[0] / str(step[1])
            if not target.exists():
                with written_folder(target) as folder:
                    for file in sorted(table.folder.iterdir()):
                        copy_file(file, folder / file.name)
            change.place(*step, Table(target).size)
            step = (table.meta.parent, table.meta.parent_version)

    def _move(self, store: Store, change: Change, tenants: list[TenantFile]) -> None:
        """Their new versions, in banks of this generation."""
        records = Records(store, prefix=f"g{change.generation}-")
        self.state.banks.mkdir(parents=True, exist_ok=True)
        for tenant in tenants:
            before = change.tenants[tenant.id]
            if tenant.version <= before.version:
                raise InvalidInput(f"tenant {tenant.id!r} has version {before.version} here and {tenant.version} in the store")
            change.put(records.add(tenant, before.uid, before.deadline_us, LIVE))
        records.write(self.state.banks)

    def _close(self, change: Change, moved: Moved) -> Moved:
        """Takes out of the snapshot what nobody stands on."""
        removed = self._unneeded(change)
        change.branches = [branch for branch in change.branches if branch not in removed]
        names = sorted(branch.folder for branch in removed)
        moved = Moved(**{**vars(moved), "removed": names})
        change.details = {name: value for name, value in vars(moved).items() if name != "generation"}
        return moved

    def _unneeded(self, change: Change) -> list:
        """Tables of older versions that no tenant, now or after a rollback, and no needed table stands on."""
        needed = {(tenant.domain, tenant.domain_version) for tenant in (*change.tenants.values(), *change.before.values())}
        newest: dict[str, int] = defaultdict(int)
        for branch in change.branches:
            newest[branch.domain] = max(newest[branch.domain], branch.version)
        needed |= set(newest.items())
        for step in list(needed):
            while step[0] is not None:
                needed.add(step)
                meta = self.table(*step).meta
                step = (meta.parent, meta.parent_version)
        return [branch for branch in change.branches if (branch.domain, branch.version) not in needed]


def _folder(repository: Path, backbone: str | None) -> Path:
    found = sorted(repository.glob(f"{backbone or '*'}/1/{Backbone.TENANTS}"))
    if len(found) != 1:
        which = ", ".join(path.parent.parent.name for path in found) or "none"
        raise InvalidInput(f"{repository} holds {len(found)} backbones ({which}): name one of them with --backbone")
    return found[0].parent


def _newest(change: Change, name: str) -> int:
    versions = [branch.version for branch in change.branches if branch.domain == name]
    if not versions:
        known = ", ".join(sorted({branch.domain for branch in change.branches}))
        raise InvalidInput(f"domain {name!r} is not served here: known are {known}")
    return max(versions)


def _canary_order(tenant: Tenant) -> bytes:
    """By chance, and the same every time."""
    return hashlib.sha256(tenant.id.encode()).digest()
