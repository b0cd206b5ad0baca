"""The tables of a copy. They travel in a thread of their own, because one may take minutes, and a revoked key must not wait.

A table arrives in a folder of its own, file after file. An interrupted one goes on where it stopped. When it matches its
checksums and is synced, its folder gets the ending `.whole`.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hplm.errors import Broken, HplmError, InvalidInput
from hplm.follow.source import Absent, Source
from hplm.follow.troubles import Troubles
from hplm.plot.branch import Branch
from hplm.plot.table import Table, TableMeta
from hplm.tenants.state import State, sync

FREE_BYTES = 64 << 20  # of the disk that tables leave, so that changes of tenants always find room
SYNC_BYTES = 16 << 20  # are synced at a time: a small snapshot, synced meanwhile, would wait for all that is not
_WHOLE = ".whole"
_META = "meta.json"


class Unwanted(Exception):
    """The source has a newer snapshot, which does not have this table."""


class Arrivals:
    """The tables on their way to a state."""

    def __init__(self, state: State, source: Source, backbone: str, troubles: Troubles, say: Callable[[str], None]) -> None:
        """`source`: for this thread alone."""
        self._state = state
        self._folder = state.folder / "arriving"
        self._source = source
        self._backbone = backbone
        self._troubles = troubles
        self._say = say
        self._change = threading.Condition()
        self._wanted: Sequence[Branch] = ()
        self._whole: set[Branch] = set()
        self._again: dict[Branch, float] = {}  # when a table that failed is tried again
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
        self._thread.start()

    def want(self, branches: Sequence[Branch]) -> None:
        """Brings these tables, one after the other. Forgets all others, also half of a table."""
        with self._change:
            if list(branches) != list(self._wanted):
                self._wanted = tuple(branches)
                self._whole &= set(branches)
                for branch in self._again.keys() - set(branches):
                    del self._again[branch]
                    self._troubles.mend(f"table {branch.folder}")
                self._change.notify_all()

    @property
    def whole(self) -> frozenset[Branch]:
        """The tables that are whole and were not taken yet."""
        with self._change:
            return frozenset(self._whole)

    def arrived(self, branch: Branch) -> Path | None:
        """Returns the folder of a table that is whole."""
        with self._change:
            return self._path(branch, _WHOLE) if branch in self._whole else None

    def take(self, branch: Branch) -> None:
        """Moves a whole table to the tables of the state, over one of the same name that no snapshot names any more."""
        target = self._state.tables / branch.folder
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path(branch, _WHOLE).rename(target)
        sync(target.parent)
        with self._change:
            self._whole.discard(branch)
            self._wanted = [wanted for wanted in self._wanted if wanted != branch]

    def close(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join()
        self._source.close()

    def _path(self, branch: Branch, ending: str = "") -> Path:
        """The first address is in the name: a later table of the same domain and version has another one."""
        return self._folder / f"{branch.domain}.{branch.version}.{branch.base}{ending}"

    def _run(self) -> None:
        while (branch := self._next()) is not None:
            about = f"table {branch.folder}"
            try:
                self._bring(branch)
            except Unwanted:
                self._troubles.mend(about)
            except Exception as error:  # this thread must not end; the copy goes on without the table
                with self._change:
                    # The source may have removed it since the last look, so a table is called missing at the second attempt.
                    if branch in self._wanted and (branch in self._again or not isinstance(error, Absent)):
                        self._troubles.meet(about, error)
                    self._again[branch] = time.monotonic() + self._troubles.pause(error)
            else:
                self._troubles.mend(about)
                with self._change:
                    if branch in self._wanted:
                        self._whole.add(branch)

    def _next(self) -> Branch | None:
        """Waits for a table to bring, and removes what is not wanted any more."""
        with self._change:
            while not self._ended:
                self._sweep()
                now = time.monotonic()
                open_ones = [branch for branch in self._wanted if branch not in self._whole]
                due = [branch for branch in open_ones if self._again.get(branch, now) <= now]
                if due:
                    return due[0]
                waits = [self._again[branch] - now for branch in open_ones]
                self._change.wait(min(waits, default=None))
        return None

    def _sweep(self) -> None:
        kept = {self._path(branch, ending) for branch in self._wanted for ending in ("", _WHOLE)}
        for path in self._folder.glob("*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _bring(self, branch: Branch) -> None:
        if self._path(branch, _WHOLE).is_dir():  # from before this process
            return
        folder = self._path(branch)
        meta = self._begin(branch, folder)
        sizes = meta.sizes()
        here = sum((folder / name).stat().st_size for name in sizes if (folder / name).exists())
        needed, free = sum(sizes.values()) - here, shutil.disk_usage(folder).free
        if needed > free - FREE_BYTES:
            raise InvalidInput(
                f"the disk of {self._state.folder} has {free / 1e6:,.0f} MB left, and table {branch.folder} needs "
                f"{needed / 1e6:,.0f} MB more: make room, or move the state to a larger disk"
            )
        self._say(f"table {branch.folder} is on its way: {needed / 1e6:,.1f} MB")
        for name, size in sizes.items():
            self._bring_file(branch, folder / name, size)
        try:
            Table(folder).verify()
        except HplmError as error:
            shutil.rmtree(folder)
            raise Broken(f"{self._source.address}/{self._url(branch)} arrived damaged, and is brought again: {error}") from None
        for path in (*folder.iterdir(), folder):
            sync(path)
        folder.rename(self._path(branch, _WHOLE))
        sync(self._folder)

    def _begin(self, branch: Branch, folder: Path) -> TableMeta:
        """Returns what the source says about a table. Removes the half of another table."""
        said = self._source.read(f"{self._url(branch)}/{_META}")
        if folder.exists() and (not (folder / _META).exists() or (folder / _META).read_bytes() != said):
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / _META).write_bytes(said)
        meta = TableMeta.load(folder / _META)
        if (meta.domain, meta.version) != (branch.domain, branch.version):
            raise Broken(f"{self._source.address}/{self._url(branch)} is another table: check the state with `hplm verify`")
        return meta

    def _bring_file(self, branch: Branch, file: Path, size: int) -> None:
        with open(file, "ab") as writing:
            here = writing.tell()
            if here > size:
                writing.truncate(0)
                here = 0
            if here < size:
                unsynced = 0
                for block in self._source.stream(f"{self._url(branch)}/{file.name}", here, size - here):
                    writing.write(block)
                    unsynced += len(block)
                    if unsynced > SYNC_BYTES:
                        os.fsync(writing.fileno())
                        unsynced = 0
                    if branch not in self._wanted or self._ended:
                        raise Unwanted
            if writing.tell() != size:
                raise Absent(f"{self._source.address}/{self._url(branch)}/{file.name} does not have {size:,} bytes")

    def _url(self, branch: Branch) -> str:
        return f"{self._backbone}/plot/{branch.folder}"
