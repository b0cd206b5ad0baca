"""Begins the registry of a new export with what another one serves (`hplm begin --from`): keys, limits and versions that fit.

A version fits if the export has the same layers and tokenizer, and no other table of its domains. Other tenants are served with
the export's own version.
"""

from __future__ import annotations

import filecmp
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hplm.adapters.record import has_content
from hplm.adapters.records import RecordFile
from hplm.errors import Broken, InvalidInput, some
from hplm.plot.table import Branch, BranchId, Table
from hplm.registry.store import RECORDS, TABLES, Absent, objects_of
from hplm.tenants.change import Change
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot, Tenant, files_of
from hplm.tenants.state_folder import EXPORTED_CONFIG, EXPORTED_RECORDS, EXPORTED_TABLES, EXPORTED_TOKENIZER, EXPORTED_UPPER

ACTION = "begin"
MEND = "Mend it with `hplm tenant update` where it is served"


@dataclass(frozen=True)
class Succession:
    """The tenants of the new registry, by the version that they have, and those that it does not serve."""

    kept: tuple[str, ...]  # the version that was served
    renewed: tuple[str, ...]  # the version of the export
    left_out: tuple[str, ...]  # exported, but not served before


def begin_from(manager: Manager, old: Manager, lease_s: float | None = None) -> Succession | None:
    """Returns what the new registry serves; None if there is one already. `lease_s`: default: that of the other one.

    After an interruption the same call makes it anew, also where a snapshot was written and CURRENT was not.
    """
    pointer = old.registry.pointer()
    succession = _Succession(manager, old, old.registry.at(pointer))
    left = manager.registry.newest_remaining()
    was_cut = left.ledger.change.get("action") == ACTION  # no later change was made
    lease_s = pointer.lease_s if lease_s is None else lease_s
    is_new = manager.registry.begin_with(ACTION, succession.edit, lease_s, left if was_cut else None)
    return succession.taken if is_new else None


class _Succession:
    def __init__(self, manager: Manager, old: Manager, served: Snapshot) -> None:
        self._manager, self._old, self._served = manager, old, served
        self._exported = {tenant.id: tenant for tenant in manager.exported.tenants}
        self._files = files_of(manager.exported.tenants)
        self._branches = {branch.id: branch for branch in served.branches}
        parts = (EXPORTED_UPPER, EXPORTED_CONFIG, EXPORTED_TOKENIZER)
        self._fits_at_all = all(filecmp.cmp(old.folder / part, manager.folder / part, shallow=False) for part in parts)
        self._same: dict[BranchId, bool] = {}  # whether the export has no other table of this domain and version
        exported = {branch.id: branch for branch in manager.exported.branches}
        for branch_id, branch in self._branches.items() if self._fits_at_all else ():
            own = exported.get(branch_id)
            self._same[branch_id] = own is None or manager.tables.content(own) == old.tables.content(branch)
        fits = {tenant.id: self._fits(tenant) for tenant in served.tenants}
        if lost := sorted(name for name, is_fit in fits.items() if not is_fit and name not in self._exported):
            raise InvalidInput(
                f"{manager.folder} has no version of {some(lost)}, and what {old.registry.store} serves of them does not fit "
                "its layers or tables: build them with `hplm build tenant` in the store of that export and export it again, or "
                "delete them where they are served with `hplm tenant delete`. Nothing was begun"
            )
        self.taken = Succession(
            kept=tuple(sorted(name for name, is_fit in fits.items() if is_fit)),
            renewed=tuple(sorted(name for name, is_fit in fits.items() if not is_fit)),
            left_out=tuple(sorted(self._exported.keys() - fits.keys())),
        )

    def edit(self, change: Change) -> None:
        ledger, kept = self._served.ledger, {*self.taken.kept}
        change.branches = list(self._manager.exported.branches)
        before = {tenant.id: tenant for tenant in ledger.before if tenant.id in kept and self._fits(tenant)}
        tenants = [tenant for tenant in self._served.tenants if tenant.id in kept]
        self._add_tables(change, [*tenants, *before.values()])
        for known in (change.tenants, change.before, change.last_versions):
            known.clear()
        for tenant in self._served.tenants:
            last = max(tenant.version, ledger.last_versions.get(tenant.id, 0))
            own = self._exported.get(tenant.id)
            uid = own.uid if own is not None else change.new_uid()
            if tenant.id not in kept:
                assert own is not None  # others are refused
                version = max(own.version, last + 1)  # clients never see a smaller one, nor one number for two versions
                stored = own.stored or (own.version if own.version != version else 0)
                change.tenants[tenant.id] = replace(own, version=version, stored=stored).set_as(tenant)
                continue
            change.tenants[tenant.id] = replace(self._moved(change, tenant), uid=uid)
            if last > tenant.version:
                change.last_versions[tenant.id] = last
            if (then := before.get(tenant.id)) is not None:
                change.before[tenant.id] = replace(self._moved(change, then), uid=uid)
        change.details = {
            "from": str(self._old.registry.store),
            "from_generation": self._served.generation,
            "renewed": self.taken.renewed,
            "left_out": self.taken.left_out,
        }

    def _fits(self, tenant: Tenant) -> bool:
        return self._fits_at_all and all(self._same[branch.id] for branch in self._chain(tenant))

    def _chain(self, tenant: Tenant) -> Iterator[Branch]:
        """Yields the tables that a tenant reads, its domain's first."""
        step: BranchId | None = tenant.branch_id
        while step is not None:
            yield self._branches[step]
            step = self._old.tables.meta(self._branches[step]).parent_branch

    def _add_tables(self, change: Change, tenants: list[Tenant]) -> None:
        """Adds the tables of tenants that the export lacks."""
        here = {branch.id for branch in change.branches}
        needed = {branch.id: branch for tenant in tenants for branch in self._chain(tenant) if branch.id not in here}
        for branch_id, branch in sorted(needed.items(), key=lambda item: item[1].base):
            with self._table(branch) as table:
                change.add_branch(*branch_id, change.kept.table(table), table.size)

    @contextmanager
    def _table(self, branch: Branch) -> Generator[Table, None, None]:
        """Opens a table of the other export or registry. One of a bucket is fetched."""
        folder = self._old.folder / EXPORTED_TABLES / branch.folder
        with ExitStack() as stack:
            if not folder.is_dir():
                store, folder = self._old.registry.store, Path(stack.enter_context(TemporaryDirectory())) / branch.folder
                folder.mkdir(parents=True)
                for name in objects_of(store, [f"{TABLES}/{branch.folder}/"]):
                    store.fetch(name, folder / name.rpartition("/")[2])
            yield Table(folder)

    def _moved(self, change: Change, tenant: Tenant) -> Tenant:
        """Returns a version with its weights where the new export or registry has them. All are in one file."""
        file = next(iter(files_of([tenant])), None)
        if file is None:
            return tenant
        name = file.rpartition("-")[2]
        if name not in self._files:
            packed = change.kept.of((tenant.id, tenant.version), lambda: RecordFile(self._content(file, tenant)))
            name = next(iter(packed.values())).file
        return tenant.with_file(name)

    def _content(self, file: str, tenant: Tenant) -> bytes:
        path = self._old.folder / EXPORTED_RECORDS / file
        try:
            content = path.read_bytes() if path.exists() else self._old.registry.store.get(f"{RECORDS}/{file}")
        except Absent as error:
            raise Broken(f"tenant {tenant.id!r}: {error}. {MEND}") from None
        if not has_content(file, content):
            raise Broken(f"tenant {tenant.id!r}: {file} does not match the checksum in its name. {MEND}")
        return content
