"""The tables of a backbone for managers: those of its export and those of its registry."""

from __future__ import annotations

from pathlib import Path

from hplm.errors import InvalidInput
from hplm.plot.meta import TableMeta
from hplm.plot.table import Branch, BranchId, Table
from hplm.registry.store import TABLES, Absent, ObjectStore
from hplm.tenants.change import Change
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import EXPORTED_TABLES


class Tables:
    def __init__(self, folder: Path, store: ObjectStore) -> None:
        self._folder = folder
        self._exported = folder / EXPORTED_TABLES
        self._store = store
        self._metas: dict[Branch, TableMeta] = {}

    def meta(self, branch: Branch) -> TableMeta:
        if branch not in self._metas:
            self._metas[branch] = TableMeta.read(self._read(branch, "meta.json"), f"meta.json of table {branch.folder}")
        return self._metas[branch]

    def is_same(self, branch: Branch, table: Table) -> bool:
        """Whether a served table has the same rows, by their checksums."""
        return self.content(branch) == (table.meta, (table.folder / "checksums").read_bytes())

    def content(self, branch: Branch) -> tuple[TableMeta, bytes]:
        """Returns what a table is and the checksums of its rows: the same of two that are alike."""
        return self.meta(branch), self._read(branch, "checksums")

    def unneeded(self, change: Change) -> list[Branch]:
        """Returns the tables of older versions that can be removed.

        No tenant needs them, now or after a rollback, and no needed table falls back to them.
        """
        known = {branch.id: branch for branch in change.branches}
        needed = {tenant.branch_id for tenant in (*change.tenants.values(), *change.before.values())}
        needed.update(dict(sorted(branch.id for branch in change.branches)).items())  # the newest version of each domain
        for start in list(needed):
            step: BranchId | None = start
            while step is not None:
                needed.add(step)
                step = self.meta(known[step]).parent_branch
        return [branch for branch in change.branches if branch.id not in needed]

    def _read(self, branch: Branch, file: str) -> bytes:
        if (path := self._exported / branch.folder / file).is_file():
            return path.read_bytes()
        try:
            return self._store.get(f"{TABLES}/{branch.folder}/{file}")
        except Absent:
            raise InvalidInput(
                f"table {branch.folder} is neither in {self._folder} nor in {self._store}: export or restore it"
            ) from None


def newest_version(served: Snapshot | Change, name: str) -> int:
    versions = [branch.version for branch in served.branches if branch.domain == name]
    if not versions:
        known = ", ".join(sorted({branch.domain for branch in served.branches}))
        raise InvalidInput(f"domain {name!r} is not served here: name one of {known}")
    return max(versions)
