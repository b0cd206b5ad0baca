"""A change of what is served, while a manager edits it, and the objects that it writes: record files and tables."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hplm.adapters.record import Record
from hplm.disk import bytes_in
from hplm.errors import HplmError
from hplm.plot.table import Branch, BranchId, Table
from hplm.registry.store import RECORDS, TABLES, ObjectStore, objects_of
from hplm.tenants.snapshot import Snapshot, Tenant

if TYPE_CHECKING:
    from hplm.adapters.records import RecordFile

AT_ONCE = 16  # objects that are written side by side
HELD_BYTES = 128 << 20  # of records that are not written yet


class ChangeFiles:
    """The records and tables that a change writes. If the change is made again, they are there already."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records: dict[Hashable, Mapping[str, Record]] = {}
        self._tables: dict[BranchId, str] = {}
        self._waiting: list[RecordFile] = []
        self._bytes = 0  # of those
        self._written: set[str] = set()  # names of records, and of tables with a slash behind

    def of(self, key: Hashable, packed_of: Callable[[], RecordFile]) -> Mapping[str, Record]:
        """`key`: what one change keeps once."""
        if key not in self._records:
            packed = replace(packed_of(), unique=f"{secrets.token_hex(4)}-")
            self._records[key] = packed.records
            if packed.records:
                self._waiting.append(packed)
                self._bytes += len(packed.content)
            if self._bytes > HELD_BYTES:
                self.write()
        return self._records[key]

    def table(self, table: Table) -> str:
        """Writes a table, which nobody sees yet, unless it has. Returns the unique part of its folder's name.

        It may take minutes. Before the change, other managers go on meanwhile.
        """
        branch_id = table.meta.domain, table.meta.version
        if branch_id not in self._tables:
            unique = self._tables[branch_id] = f"-{secrets.token_hex(4)}"
            folder = f"{TABLES}/{branch_id[0]}/{branch_id[1]}{unique}/"
            self._written.add(folder)
            try:
                files = table.files()
                self._store.expect_room(bytes_in(*files.values()), f"the table in {table.folder}")
                for name, file in files.items():
                    self._store.put(f"{folder}{name}", file)
            except (HplmError, OSError, KeyboardInterrupt):
                with suppress(HplmError, OSError):  # a later change removes it after a day
                    self.delete_written()
                raise
        return self._tables[branch_id]

    def write(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._put, waiting))

    def delete_written(self, needed: Set[str] = frozenset()) -> None:
        """Removes what it has written, but for the names that are needed."""
        self._store.delete(objects_of(self._store, self._written - needed))

    def _put(self, packed: RecordFile) -> None:
        name = f"{RECORDS}/{packed.name}"
        self._written.add(name)
        self._store.put(name, packed.content)


class Change:
    """The next generation, while a manager edits it. At first it is as the one before."""

    def __init__(self, kept: ChangeFiles, before: Snapshot) -> None:
        ledger = before.ledger
        self.kept = kept
        self.generation = before.generation + 1
        self.tenants = {tenant.id: tenant for tenant in before.tenants}
        self.branches = list(before.branches)
        self.next_address, self.next_uid = ledger.next_address, ledger.next_uid
        self.before = {tenant.id: tenant for tenant in ledger.before}  # the version that each tenant can be rolled back to
        self.last_versions = dict(ledger.last_versions)
        self.lease_s: float | None = None  # that of the registry from now on; None: as before
        self.is_empty = False  # whether there is nothing to publish
        self.details: dict[str, Any] = {}  # for the audit log

    def put(self, tenant: Tenant) -> None:
        """Adds a tenant or its next version, and keeps the version before for a rollback."""
        if tenant.id in self.tenants:
            self.before[tenant.id] = self.tenants[tenant.id]
        self.tenants[tenant.id] = tenant
        self.last_versions.pop(tenant.id, None)

    def roll_back(self, tenant_id: str) -> Tenant:
        """Returns a tenant to its version before, with the current keys and limits."""
        self.last_versions[tenant_id] = self.next_version(tenant_id) - 1
        now, then = self.tenants[tenant_id], self.before.pop(tenant_id)
        self.tenants[tenant_id] = then.set_as(now)
        return self.tenants[tenant_id]

    def remove_tenant(self, tenant_id: str) -> None:
        del self.tenants[tenant_id]
        self.last_versions.pop(tenant_id, None)
        self.before.pop(tenant_id, None)

    def new_uid(self) -> int:
        """Returns a uid that is never used twice, because slots and tickets may still name a deleted tenant."""
        self.next_uid += 1
        return self.next_uid - 1

    def next_version(self, tenant_id: str) -> int:
        """Returns the tenant's next version. No version is used twice, not even after a rollback."""
        tenant = self.tenants.get(tenant_id)
        return max(self.last_versions.get(tenant_id, 0), tenant.version) + 1 if tenant is not None else 1

    def add_branch(self, domain: str, version: int, unique: str, size: int) -> Branch:
        """Adds a branch with new addresses. No address is used twice, because tickets may still name a deleted table."""
        branch = Branch(domain, version, self.next_address, unique)
        self.branches.append(branch)
        self.next_address += size
        return branch
