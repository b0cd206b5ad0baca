"""Changes what is served: tenants come, move to a new version, go back, go; domains go back and go. Each is one generation."""

from __future__ import annotations

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from hplm.adapters.bank import Bank, Record, write_bank, write_record
from hplm.adapters.heads import grown, size_for
from hplm.adapters.layout import Layout
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.plot.forest import Branch
from hplm.plot.table import Table, TableMeta
from hplm.tasks import TASKS
from hplm.tenants.keys import Key, new_key
from hplm.tenants.registry import Change, Registry, sync
from hplm.tenants.snapshot import LIVE, Snapshot, Tenant
from hplm.tenants.state import EXPORTED_BANKS, EXPORTED_TABLES, EXPORTED_TENANTS, State

log = logging.getLogger(__name__)
LARGEST_LIMIT = 10**12  # requests, or microseconds
LONGEST_DAYS = 100_000  # of a key


@dataclass(frozen=True)
class Knowledge:
    """What makes a tenant: tensors named and shaped as their layouts say."""

    domain: str
    domain_version: int
    task: str
    labels: tuple[str, ...]
    head: tuple[Layout, Mapping[str, Tensor]]
    adapter: tuple[Layout, Sequence[Mapping[str, Tensor]]] | None
    version: int = 0  # where it comes from; 0: it has none there


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
    waiting: list[str]  # tuned again, and held back by the canary share
    behind: list[str]  # still on an older version, and not tuned again
    removed: list[str]  # tables that nobody stands on any more


class Manager:
    """Of one exported backbone (`model_repository/<backbone>/1`) and the state it is served with."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self.exported = Snapshot.load(folder / EXPORTED_TENANTS)
        self.state = State(state / folder.parent.name)
        last = max(self.exported.branches, key=lambda branch: branch.base)
        free = last.base + TableMeta.load(folder / EXPORTED_TABLES / last.folder / "meta.json").rows
        last_uid = max((tenant.uid for tenant in self.exported.tenants), default=0)
        self.registry = Registry(self.state, self.exported, free, last_uid + 1)

    def current(self) -> Snapshot:
        """What readers see now; nothing is written."""
        generation = self.state.current()
        return self.state.load(generation) if generation else self.exported

    def find_table(self, domain: str, version: int) -> Table | None:
        for folder in (self.folder / EXPORTED_TABLES, self.state.tables):
            if (folder / domain / str(version)).is_dir():
                return Table(folder / domain / str(version))
        return None

    def table(self, domain: str, version: int) -> Table:
        table = self.find_table(domain, version)
        if table is None:
            raise InvalidInput(f"table {domain}/{version} is neither in {self.folder} nor in {self.state.folder}")
        return table

    def add(self, tenant_id: str, knowledge: Knowledge) -> TenantChange:
        with self.registry.change("tenant add") as change:
            if tenant_id in change.tenants:
                raise InvalidInput(f"tenant {tenant_id!r} is served already: `hplm tenant update` brings its next version")
            return self._put(change, tenant_id, knowledge)

    def update(self, tenant_id: str, knowledge: Knowledge) -> TenantChange:
        """Its next version; the one before can be gone back to."""
        with self.registry.change("tenant update") as change:
            _known(change, tenant_id)
            return self._put(change, tenant_id, knowledge)

    def roll_back(self, tenant_id: str) -> TenantChange:
        with self.registry.change("tenant rollback") as change:
            now = _known(change, tenant_id)
            if tenant_id not in change.before:
                raise InvalidInput(f"tenant {tenant_id!r} has no version before {now.version} to go back to")
            then = change.roll_back(tenant_id)
            return _recorded(change, TenantChange(change.generation, tenant_id, now.version, then.version))

    def delete(self, tenant_id: str) -> TenantChange:
        """Its requests are refused from then on; its bytes are overwritten by the next tenant, or go with `compact`."""
        with self.registry.change("tenant delete") as change:
            gone = _known(change, tenant_id)
            change.remove(tenant_id)
            return _recorded(change, TenantChange(change.generation, tenant_id, gone.version, None))

    def add_key(self, tenant_id: str, days: float = 0) -> tuple[str, Key]:
        """The secret is not kept: this is the only time that anybody sees it."""
        if type(days) not in (int, float) or not 0 <= days <= LONGEST_DAYS:
            raise InvalidInput(f"'days' is {days!r}: from 0 to {LONGEST_DAYS:,}, 0 for a key that does not expire")
        secret, key = new_key(round(time.time() + 86400 * days) if days else 0)
        with self.registry.change("tenant key add") as change:
            tenant = _known(change, tenant_id)
            change.replace(replace(tenant, keys=(*tenant.keys, key)))
            change.details = {"tenant": tenant_id, "key": key.id}
        return secret, key

    def revoke_key(self, tenant_id: str, key_id: str) -> None:
        with self.registry.change("tenant key revoke") as change:
            tenant = _known(change, tenant_id)
            left = tuple(key for key in tenant.keys if key.id != key_id)
            if len(left) == len(tenant.keys):
                known = ", ".join(key.id for key in tenant.keys) or "none"
                raise InvalidInput(f"tenant {tenant_id!r} has no key {key_id!r}: it has {known}")
            if not left:
                raise InvalidInput(
                    f"{key_id!r} is the last key of tenant {tenant_id!r}, which would be open to everybody without: add "
                    "another one first, or delete the tenant"
                )
            change.replace(replace(tenant, keys=left))
            change.details = {"tenant": tenant_id, "key": key_id}

    def limit(self, tenant_id: str, **limits: float) -> Tenant:
        """Quotas and the default deadline: fields of a tenant that are no knowledge."""
        _check_limits(limits)
        with self.registry.change("tenant limit") as change:
            tenant = replace(_known(change, tenant_id), **limits)
            change.replace(tenant)
            change.details = {"tenant": tenant_id, **limits}
        return tenant

    def compact(self) -> int:
        """Copies what is in use out of the state's banks into new ones without holes; returns the bytes that were won."""
        with self.registry.change("compact") as change:
            before = _size(self.state.banks)
            tenants = (*change.tenants.values(), *change.before.values())
            used = {record for tenant in tenants for record in tenant.records() if record.bank.startswith(LIVE)}
            banks = {name: self.state.open_bank(name) for name in {record.bank for record in used}}
            by_layout: dict[Layout, list[Record]] = defaultdict(list)
            for record in sorted(used, key=lambda record: (record.bank, record.index)):
                by_layout[banks[record.bank].layout].append(record)
            moved: dict[Record, Record] = {}
            for layout, kept in by_layout.items():
                if kept[0].bank == kept[-1].bank and len(kept) == banks[kept[0].bank].records:  # one bank without holes
                    continue
                entries = []
                for record in kept:
                    flat = layout.empty()
                    banks[record.bank].read(record, flat)
                    entries.append((record.uid, record.version, flat))
                target = f"{layout.name}.g{change.generation}.bank"
                write_bank(self.state.banks / target, layout, entries)
                moved |= {old: replace(old, bank=LIVE + target, index=i) for i, old in enumerate(kept)}
            for known in (change.tenants, change.before):
                for tenant_id, tenant in known.items():
                    adapter = moved.get(tenant.adapter, tenant.adapter) if tenant.adapter is not None else None
                    known[tenant_id] = replace(tenant, head=moved.get(tenant.head, tenant.head), adapter=adapter)
            change.details = {"records": len(moved)}
        return max(0, before - _size(self.state.banks))

    def adopt_domain(self, name: str, version: int, source: Path) -> DomainChange:
        """A copy of a table's folder becomes the state's; it falls back to tables that are served."""
        self._check_table(name, version, source, self.registry.current().branches)
        self.refuse_another(Table(source))
        with self.state.aside() as aside:
            arrived = aside / str(version)
            shutil.copytree(source, arrived)
            arrived.chmod(arrived.stat().st_mode | 0o700)  # what its owner may not write cannot be moved either
            for path in (*arrived.iterdir(), arrived):
                sync(path)
            with self.registry.change("domain add") as change:  # only now: a copy takes minutes, and others wait for one
                self._check_table(name, version, source, change.branches)
                target = self.state.tables / name / str(version)
                shutil.rmtree(target, ignore_errors=True)  # of an attempt that was cut: nobody is served from it
                target.parent.mkdir(parents=True, exist_ok=True)
                arrived.rename(target)
                change.place(name, version, Table(target).size)
                return self.close(change, DomainChange(change.generation, name, version, [], [], [], []))

    def _check_table(self, name: str, version: int, source: Path, branches: Sequence[Branch]) -> None:
        meta = Table(source).meta
        here = {(branch.domain, branch.version) for branch in branches}
        if (name, version) in here or (meta.domain, meta.version) != (name, version):
            raise InvalidInput(f"{source} is version {meta.version} of domain {meta.domain!r}, or that is served already")
        if (meta.parent, meta.parent_version) not in here:
            raise InvalidInput(f"{source} falls back to version {meta.parent_version} of {meta.parent!r}: not served here")
        known = self.table(branches[0].domain, branches[0].version).meta
        if (meta.window, meta.vocabulary, meta.hidden) != (known.window, known.vocabulary, known.hidden):
            raise InvalidInput(f"{source} was built for another backbone than {self.folder.parent.name!r}")

    def refuse_another(self, table: Table) -> None:
        """Readers look into the export first: a number that it has is that table's for ever, served or not."""
        meta = table.meta
        exported = self.folder / EXPORTED_TABLES / meta.domain / str(meta.version)
        if exported.is_dir() and not Table(exported).same_as(table):
            raise InvalidInput(
                f"version {meta.version} of domain {meta.domain!r} was exported and is another table: give this a new one"
            )

    def roll_back_domain(self, name: str) -> DomainChange:
        """Tenants of the newest version that came from an older one go back to it, as they were."""
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
                raise InvalidInput(f"no tenant of domain {name!r} has a version to go back to")
            to = {change.roll_back(tenant_id).domain_version for tenant_id in back}
            return self.close(change, DomainChange(change.generation, name, max(to), sorted(back), [], [], []))

    def delete_domain(self, name: str) -> DomainChange:
        with self.registry.change("domain delete") as change:
            version = newest_version(change, name)
            if name == "root":
                raise InvalidInput("everything falls back to the root: it cannot be deleted")
            users = [f"tenant {tenant.id}" for tenant in change.tenants.values() if tenant.domain == name]
            for branch in change.branches:
                if branch.domain != name and self.table(branch.domain, branch.version).meta.parent == name:
                    users.append(f"domain {branch.domain} version {branch.version}")
            if users:
                more = f" and {len(users) - 5} more" if len(users) > 5 else ""
                raise InvalidInput(f"domain {name!r} is in use by {', '.join(sorted(users)[:5])}{more}: delete those first")
            change.branches = [branch for branch in change.branches if branch.domain != name]
            for tenant_id in [tenant_id for tenant_id, before in change.before.items() if before.domain == name]:
                change.forget(tenant_id)
            return self.close(change, DomainChange(change.generation, name, version, [], [], [], []))

    def close(self, change: Change, done: DomainChange) -> DomainChange:
        """Takes out of the snapshot the tables that nobody stands on."""
        removed = self._unneeded(change)
        change.branches = [branch for branch in change.branches if branch not in removed]
        done = replace(done, removed=sorted(branch.folder for branch in removed))
        change.details = {name: value for name, value in asdict(done).items() if name != "generation"}
        return done

    def settle(self, generation: int) -> list[str]:
        """Waits until every reader has taken the generation; returns those that have not within ten seconds."""
        if self.state.current() < generation:  # it was decided and could not be published
            self.registry.finish()
        try:
            return self.state.wait_for_readers(generation)
        except OSError as error:  # of a change that is made nothing may get lost, least of all a new key
            log.warning("which servers have taken generation %d cannot be read: %s", generation, error)
            return []

    def settle_now(self) -> list[str]:
        """For the last change that was made here."""
        return self.settle(self.registry.decided)

    def put_record(
        self, change: Change, layout: Layout, uid: int, version: int, layers: Sequence[Mapping[str, Tensor]]
    ) -> Record:
        """Into a free record of a bank of the state, or one more at its end."""
        self.state.banks.mkdir(parents=True, exist_ok=True)
        flat = layout.pack(layers)
        for path in sorted(self.state.banks.glob("*.bank")):
            try:
                bank = self.state.open_bank(path.name)
            except HplmError as error:  # served without it, and changed without it
                log.warning("nothing is written into it: %s", error)
                continue
            if bank.layout != layout:
                continue
            taken = change.records_of(LIVE + path.name)
            index = next((i for i in range(bank.records) if i not in taken), bank.records)
            write_record(path, layout, index, uid, version, flat)
            change.take(record := Record(LIVE + path.name, index, uid, version))
            return record
        path = self.state.banks / f"{layout.name}.g{change.generation}.bank"  # a name is never given twice
        if change.records_of(LIVE + path.name):
            raise Broken(f"bank {path}, which this change has begun, cannot be read: give the command again")
        write_bank(path, layout, [(uid, version, flat)])
        change.take(record := Record(LIVE + path.name, 0, uid, version))
        return record

    def _put(self, change: Change, tenant_id: str, knowledge: Knowledge) -> TenantChange:
        self._check(change, tenant_id, knowledge)
        before = change.tenants.get(tenant_id)
        if before is not None and (knowledge.task, knowledge.labels) != (before.task, before.labels):
            raise InvalidInput(
                f"tenant {tenant_id!r} has the task {before.task} with {len(before.labels)} labels, and an update keeps "
                "both: its clients rely on them. Add a tenant of another name"
            )
        uid = before.uid if before is not None else change.new_uid()
        version = max(change.next_version(tenant_id), knowledge.version)  # the store's own, unless that is given
        layout, head = knowledge.head
        size = size_for(len(knowledge.labels))
        head_record = self.put_record(change, replace(layout, size=size), uid, version, [grown(head, size)])
        adapter = None
        if knowledge.adapter is not None:
            adapter = self.put_record(change, knowledge.adapter[0], uid, version, knowledge.adapter[1])
        fields = dict(
            version=version,
            domain=knowledge.domain,
            domain_version=knowledge.domain_version,
            task=knowledge.task,
            labels=knowledge.labels,
            head=head_record,
            adapter=adapter,
        )
        change.put(replace(before, **fields) if before is not None else Tenant(id=tenant_id, uid=uid, **fields))
        return _recorded(change, TenantChange(change.generation, tenant_id, before.version if before else None, version))

    def _check(self, change: Change, tenant_id: str, knowledge: Knowledge) -> None:
        if knowledge.task not in TASKS:
            raise InvalidInput(f"tenant {tenant_id!r}: task {knowledge.task!r} is not known: choose {' or '.join(TASKS)}")
        size = TASKS[knowledge.task].head_size(len(knowledge.labels))
        if len(knowledge.labels) != size:
            found = len(knowledge.labels)
            raise InvalidInput(f"tenant {tenant_id!r} has {found} labels: one of the task {knowledge.task} has {size}")
        branch = (knowledge.domain, knowledge.domain_version)
        if branch not in {(branch.domain, branch.version) for branch in change.branches}:
            raise InvalidInput(
                f"tenant {tenant_id!r} stands on version {branch[1]} of domain {branch[0]!r}, which is not served: "
                "`hplm domain add` or `hplm domain update` brings it"
            )
        served = self.exported.tenants
        known = Bank(self.folder / EXPORTED_BANKS / served[0].head.bank).layout if served else knowledge.head[0]
        for layout in (knowledge.head[0], *((knowledge.adapter[0],) if knowledge.adapter else ())):
            if layout.hidden != known.hidden:
                raise InvalidInput(f"tenant {tenant_id!r} is of width {layout.hidden}, this backbone of {known.hidden}")

    def _unneeded(self, change: Change) -> list[Branch]:
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


def newest_version(served: Snapshot | Change, name: str) -> int:
    versions = [branch.version for branch in served.branches if branch.domain == name]
    if not versions:
        known = ", ".join(sorted({branch.domain for branch in served.branches}))
        raise InvalidInput(f"domain {name!r} is not served here: known are {known}")
    return max(versions)


def _known(change: Change, tenant_id: str) -> Tenant:
    if tenant_id not in change.tenants:
        raise InvalidInput(f"tenant {tenant_id!r} is not served: `hplm tenant list` names those that are")
    return change.tenants[tenant_id]


def _check_limits(limits: Mapping[str, float]) -> None:
    if not limits or any(type(value) not in (int, float) for value in limits.values()):
        raise InvalidInput("give 'rate', 'burst', 'in_flight' or 'deadline_us', each a number")
    if not all(0 <= value <= LARGEST_LIMIT for value in limits.values()):
        names = ", ".join(map(repr, limits))
        raise InvalidInput(f"{names}: none of them negative or above {LARGEST_LIMIT:,}; 0 takes a limit away")
    if any(type(limits.get(name, 0)) is not int for name in ("in_flight", "deadline_us")):
        raise InvalidInput("'in_flight' and 'deadline_us' are whole numbers")


def _recorded(change: Change, done: TenantChange) -> TenantChange:
    change.details = {name: value for name, value in asdict(done).items() if name != "generation"}
    return done


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))
