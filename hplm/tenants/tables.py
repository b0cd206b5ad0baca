"""The tables of a backbone for managers: those of its export and those of its live state."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hplm.errors import InvalidInput
from hplm.plot.branch import Branch
from hplm.plot.room import bytes_in, check_room
from hplm.plot.table import Table
from hplm.tenants.registry import Change
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import EXPORTED_TABLES, State, sync


class Tables:
    def __init__(self, folder: Path, state: State) -> None:
        self._folder = folder
        self._exported = folder / EXPORTED_TABLES
        self._state = state

    def find(self, domain: str, version: int) -> Table | None:
        for folder in (self._exported, self._state.tables):
            if (folder / domain / str(version)).is_dir():
                return Table(folder / domain / str(version))
        return None

    def open(self, domain: str, version: int) -> Table:
        table = self.find(domain, version)
        if table is None:
            raise InvalidInput(
                f"table {domain}/{version} is neither in {self._folder} nor in {self._state.folder}: export or restore it"
            )
        return table

    def check_arrival(self, name: str, version: int, source: Path, branches: Sequence[Branch]) -> None:
        """Raises if a folder does not contain this table, or if the table does not fit the served tables."""
        meta = Table(source).meta
        here = {(branch.domain, branch.version) for branch in branches}
        if (name, version) in here or (meta.domain, meta.version) != (name, version):
            raise InvalidInput(
                f"{source} is version {meta.version} of domain {meta.domain!r}, which is served already or was not requested: "
                "name a table that is not served"
            )
        if (meta.parent, meta.parent_version) not in here:
            raise InvalidInput(
                f"{source} falls back to version {meta.parent_version} of domain {meta.parent!r}, which is not served here: "
                "add that first"
            )
        known = self.open(branches[0].domain, branches[0].version).meta
        if (meta.window, meta.vocabulary, meta.hidden) != (known.window, known.vocabulary, known.hidden):
            raise InvalidInput(
                f"{source} was not built for backbone {self._folder.parent.name!r}: name a table of this backbone"
            )

    def refuse_another(self, table: Table) -> None:
        """Raises if the export has a different table of this version. Readers would find and open that one first."""
        meta = table.meta
        exported = self._exported / meta.domain / str(meta.version)
        if exported.is_dir() and not Table(exported).same_as(table):
            raise InvalidInput(
                f"version {meta.version} of domain {meta.domain!r} was exported with another table: build this table as a new "
                "version"
            )

    def copy(self, source: Path, aside: Path) -> Path:
        """Returns a synced copy of a table's folder, for `take`."""
        copy = aside / source.name
        check_room(aside, bytes_in(source), f"the table in {source}", f"free some space for {self._state.folder}")
        shutil.copytree(source, copy)
        copy.chmod(copy.stat().st_mode | 0o700)  # a folder that its owner may not write cannot be moved
        for path in copy.iterdir():
            sync(path)
        return copy

    def take(self, change: Change, copy: Path) -> None:
        """Moves a complete copy, which is on the state's file system, to the state's tables."""
        meta = Table(copy).meta
        target = self._state.tables / meta.domain / str(meta.version)
        shutil.rmtree(target, ignore_errors=True)  # left by an interrupted change, and not in use
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(copy)  # the names of its files: only their content is on disk
        copy.rename(target)
        sync(target.parent)
        change.add_branch(meta.domain, meta.version, meta.rows)

    def unneeded(self, change: Change) -> list[Branch]:
        """Returns the tables of older versions that can be removed.

        No tenant needs them, now or after a rollback, and no needed table falls back to them.
        """
        needed = {(tenant.domain, tenant.domain_version) for tenant in (*change.tenants.values(), *change.before.values())}
        newest: dict[str, int] = defaultdict(int)
        for branch in change.branches:
            newest[branch.domain] = max(newest[branch.domain], branch.version)
        needed |= set(newest.items())
        for start in list(needed):
            step: tuple[str, int] | None = start
            while step is not None:
                needed.add(step)
                step = self.open(*step).meta.parent_branch
        return [branch for branch in change.branches if (branch.domain, branch.version) not in needed]


def newest_version(served: Snapshot | Change, name: str) -> int:
    versions = [branch.version for branch in served.branches if branch.domain == name]
    if not versions:
        known = ", ".join(sorted({branch.domain for branch in served.branches}))
        raise InvalidInput(f"domain {name!r} is not served here: name one of {known}")
    return max(versions)
