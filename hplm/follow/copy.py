"""The copy of one backbone's state.

Its generations have numbers of their own, because neither tickets nor generations leave a server. A generation is written in
this order: records, the snapshot, what it stands for (FOLLOWED), tables that have arrived, CURRENT. Whatever is interrupted,
CURRENT names a generation whose files are all here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hplm.errors import Broken, HplmError, InvalidInput
from hplm.follow.assembly import Assembly, Place, assemble
from hplm.follow.readers import Readers
from hplm.follow.records import Records, Unlike
from hplm.follow.source import Absent, Away, Source
from hplm.follow.tables import Arrivals
from hplm.follow.troubles import Troubles
from hplm.plot.branch import Branch
from hplm.plot.table import Table, TableMeta
from hplm.tenants.followed import Followed, Heard, Reached
from hplm.tenants.registry import KEPT_SNAPSHOTS
from hplm.tenants.snapshot import NAME, Snapshot
from hplm.tenants.state import EXPORTED_TABLES, EXPORTED_TENANTS, REST_SECONDS, State

SWEEPING_SECONDS = 1.0
HEARD_SECONDS = 1.0  # between two times that are written down
LOCK_ATTEMPTS = 10
SECONDS_BETWEEN_ATTEMPTS = 0.1
ANEW = "stop the servers of this copy, and begin it anew in an empty --state"
BRINGING_SECONDS = 0.2  # how long records are brought before the source is asked for a newer generation


class Foreign(InvalidInput):
    """The source is not as it was when this copy was made, or belongs to another export. What it removed may still be here."""


class Copy:
    def __init__(self, folder: Path, state: Path, connect: Callable[[], Source], name: str, say: Callable[[str], None]) -> None:
        """`folder`: of the exported backbone. `connect` returns a new connection to the source. `name`: in reports."""
        self.backbone = folder.parent.name
        self.state = State(state / self.backbone)
        self.troubles = Troubles(lambda line: say(f"{self.backbone}: {line}"))
        self._say = say
        self._name = name
        self._exported_tables = folder / EXPORTED_TABLES
        self._exported = Snapshot.load(folder / EXPORTED_TENANTS)
        self._source = connect()
        self._lock = self._locked()
        try:
            self._followed = self._begun()
            self.newest = self._local()
            self._heard = self._heard_before()
        except BaseException:
            os.close(self._lock)
            raise
        self._wanted: Snapshot | None = None  # the newest of the source that was seen
        self._digest = ""  # of its file
        self._tables = {branch for branch in self.newest.branches if self._is_sound(branch)}
        self._parents: dict[Branch, Place | None] = {}
        self._unneeded: dict[Path, float] = {}  # when a table's folder is removed
        self._published: object = None  # what was here when a snapshot was last assembled
        self._is_whole = False
        self._told: int | None = None  # the last generation that was said to be here
        self._swept = 0.0
        self._readers = Readers(self.state)
        self._records = Records(self.state, self.newest.tenants)
        self._arrivals = Arrivals(self.state, connect(), self.backbone, self.troubles, self._tell)

    def close(self) -> None:
        self._arrivals.close()
        self._source.close()
        os.close(self._lock)

    @property
    def reached(self) -> Reached:
        """The generations of the source that the newest one here stands for."""
        return self._followed.reached.get(self.newest.generation, Reached())

    @property
    def is_whole(self) -> bool:
        """Whether all of the newest generation that was seen at the source is here."""
        return self._is_whole

    def look(self) -> None:
        """Takes over what is new at the source. Raises if something cannot be taken over; all else was."""
        wanted, self._wanted = self._wanted, None  # a source that was away or strange may come back as another one
        generation = self._source.current(self.backbone)
        try:
            if wanted is None or (generation or 0) != wanted.generation:
                wanted = self._taken(generation)
            self._wanted = wanted
            self._take_over(wanted)
            if generation is not None and not self.state.current_file.exists():
                self.state.publish(self.newest.generation)  # the source has a state, which says what the export says
        except (Unlike, Absent):
            if self._source.current(self.backbone) == generation:  # else a newer generation no longer needs it
                raise

    def _take_over(self, wanted: Snapshot) -> None:
        self._publish(wanted)
        try:
            if not self._is_whole and (missing := self._records.missing(wanted.tenants)):
                self._records.bring(self._source, self.backbone, missing, BRINGING_SECONDS, self.newest.generation + 1)
        finally:
            self._publish(wanted)
            self._arrivals.want([branch for branch in wanted.branches if not self._is_here(branch)])
            self._sweep(wanted)

    def note(self) -> None:
        """Writes down the trouble that keeps this copy behind, for `hplm doctor`."""
        worst = self.troubles.worst()
        trouble, since = (worst.says, worst.since) if worst is not None else ("", 0.0)
        if (trouble, since) != (self._followed.trouble, self._followed.since):
            self._remember(replace(self._followed, trouble=trouble, since=since))

    def hear(self, now: float, is_equal: bool) -> None:
        """Writes down that the source has answered, and that this copy is equal to it if it is: for the server's metrics."""
        if not 0 <= now - self._heard.answered < HEARD_SECONDS or (is_equal and self._heard.equal < self._heard.answered):
            self._heard = Heard(now, now if is_equal else self._heard.equal)
            self._heard.save(self.state.heard)

    def report(self, reached: Reached) -> None:
        """Tells the source what all readers of this copy have taken."""
        self._source.report(f"{self.backbone}/readers/{self._name}", f"{reached.whole} {reached.removed}\n")

    def least(self, now: float) -> Reached:
        """Returns what all readers of this copy have taken."""
        served = self._readers.taken(self.newest.generation, now)
        found = [self._followed.reached.get(generation, Reached()) for generation in served]
        return Reached(min(reached.whole for reached in found), min(reached.removed for reached in found))

    def is_read(self, now: float) -> bool:
        """Whether a server reads this copy. One that may not write cannot be seen."""
        return not all(taken.is_silent for taken in self.state.taken(now))

    def take_leave(self, now: float) -> None:
        """Tells the source that nothing is served from this copy any more, if that is so."""
        if not self.is_read(now):
            self._source.report(f"{self.backbone}/readers/{self._name}", "-\n")

    def _tell(self, line: str) -> None:
        self._say(f"{self.backbone}: {line}")

    def _locked(self) -> int:
        self.state.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.state.folder, os.O_RDONLY)
        for _ in range(LOCK_ATTEMPTS):  # `hplm doctor` holds it for a moment
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
        os.close(descriptor)
        raise InvalidInput(
            f"another `hplm follow` writes into {self.state.folder}: stop it, or give this one a --state of its own"
        )

    def _begun(self) -> Followed:
        """Marks the state as a copy, or goes on with one. Raises if it is something else."""
        source = self._source.address
        if not self.state.followed.exists():
            if self.state.registry.exists() or self.state.current():
                raise InvalidInput(f"{self.state.folder} is a state of its own and no copy: name another --state")
            Followed(source).save(self.state.followed)
        followed = Followed.load(self.state.followed)
        if followed.source != source:
            raise InvalidInput(
                f"{self.state.folder} is a copy of {followed.source}, not of {source}: name an empty --state, or that source"
            )
        return followed

    def _heard_before(self) -> Heard:
        """Goes on with what is written down. Else a copy is behind from now on, even if its source never answers."""
        heard = Heard.load(self.state.heard)
        if heard is None:
            heard = Heard(0.0, time.time())
            heard.save(self.state.heard)
        return heard

    def _local(self) -> Snapshot:
        generation = self.state.current()
        try:
            newest = self.state.load(generation) if generation else self._exported
        except HplmError as error:
            raise Broken(
                f"the copy in {self.state.folder} cannot be read ({error}): begin it anew in an empty --state"
            ) from None
        if newest.export != self._exported.export:
            raise InvalidInput(f"{self.state.folder} belongs to another export of {self.backbone!r}: name an empty --state")
        return newest

    def _taken(self, generation: int | None) -> Snapshot:
        """Returns the source's snapshot of a generation. Raises if it cannot be one of the same state."""
        place, known = f"{self._source.address}/{self.backbone}", self._followed.newest
        if not generation:
            if known:
                raise Foreign(
                    f"{place} has gone back from generation {known} to 0: if its disk is missing, bring it back; if it was "
                    f"restored, {ANEW}"
                )
            if generation is None:
                self._expect_source(place)
            return self._exported
        if self._has_gone_back(generation):
            if not self._followed.went_back:
                self._remember(replace(self._followed, went_back=True))
            raise Foreign(f"{place} has gone back behind generation {known}, as a restored state: {ANEW}")
        snapshot, self._digest = self._read(generation)
        return snapshot

    def _expect_source(self, place: str) -> None:
        """Raises if a server without CURRENT takes no reports either: at a wrong address, any server has none."""
        try:
            self.report(Reached())
        except Away:
            raise
        except HplmError as error:
            raise InvalidInput(
                f"{place} has no CURRENT and takes no reports, so it may be no source: check the address in --from; if it is a "
                "bucket, copy a state that `hplm begin` has begun"
            ) from error

    def _has_gone_back(self, generation: int) -> bool:
        """Whether the source's changes, up to the newest one seen here, are not those that were seen."""
        known = self._followed.newest
        if self._followed.went_back or generation < known:
            return True
        try:
            return known > 0 and self._read(known)[1] != self._followed.digest
        except Absent:  # the source keeps only its last snapshots
            if generation == known:
                raise
            return False

    def _read(self, generation: int) -> tuple[Snapshot, str]:
        """Returns a snapshot of the source, and the SHA-256 of its file."""
        place = f"{self._source.address}/{self.backbone}"
        path = f"{self.backbone}/snapshots/{generation}"
        text = self._source.read(path)
        snapshot = Snapshot.read(text, f"{self._source.address}/{path}", "use one version of hplm everywhere")
        if snapshot.export != self._exported.export:
            raise Foreign(f"{place} belongs to another export than the repository here: copy the repository of the source")
        if snapshot.generation != generation or not all(NAME.fullmatch(branch.domain) for branch in snapshot.branches):
            raise Broken(f"{self._source.address}/{path} is not the snapshot of generation {generation}: check the source")
        return snapshot, hashlib.sha256(text).hexdigest()

    def _publish(self, wanted: Snapshot) -> None:
        """Publishes what is here of the source's snapshot, if that is more or less than the newest generation has."""
        here = wanted.generation, self._records.brought, self._arrivals.whole
        if here == self._published:
            return
        assembly = assemble(wanted, self.newest, self._is_here, self._parent, self._records.moved)
        reached = Reached(wanted.generation if assembly.is_whole else self.reached.whole, wanted.generation)
        if not assembly.is_same(self.newest):
            self._write(assembly, reached)
        elif reached != self.reached:
            self._remember(self._standing_for(self.newest.generation, reached))
        self._published, self._is_whole = here, assembly.is_whole
        if assembly.is_whole and self._told != wanted.generation:
            self._told = wanted.generation
            counts = f"{len(assembly.tenants):,} tenants, {len(assembly.branches):,} tables"
            self._tell(f"generation {wanted.generation} of the source is here: {counts}")

    def _write(self, assembly: Assembly, reached: Reached) -> None:
        generation = self.newest.generation + 1
        snapshot = Snapshot(generation, assembly.branches, assembly.tenants, self._exported.export)
        self.state.snapshots.mkdir(exist_ok=True)
        snapshot.save(self.state.snapshots / str(generation))
        self._remember(self._standing_for(generation, reached))
        for branch in assembly.branches:
            if self._arrivals.arrived(branch) is not None:
                self._arrivals.take(branch)
                self._tables.add(branch)
        self.state.sync_folders()
        self.state.publish(generation)
        self.newest = snapshot
        self._tables &= set(snapshot.branches)

    def _standing_for(self, generation: int, reached: Reached) -> Followed:
        known = {**self._followed.reached, generation: reached}
        kept = {number: known[number] for number in sorted(known)[-KEPT_SNAPSHOTS:]}
        return replace(self._followed, reached=kept, digest=self._digest)

    def _remember(self, followed: Followed) -> None:
        followed.save(self.state.followed)
        self._followed = followed

    def _is_here(self, branch: Branch) -> bool:
        return branch in self._tables or self._is_exported(branch) or self._arrivals.arrived(branch) is not None

    def _is_exported(self, branch: Branch) -> bool:
        return (self._exported_tables / branch.folder).is_dir()

    def _is_sound(self, branch: Branch) -> bool:
        if self._is_exported(branch):
            return False  # it is not of this state
        try:
            Table(self.state.tables / branch.folder)
        except HplmError:
            return False
        return True

    def _parent(self, branch: Branch) -> Place | None:
        if branch not in self._parents:
            state = self._arrivals.arrived(branch) or self.state.tables / branch.folder
            folder = self._exported_tables / branch.folder if self._is_exported(branch) else state
            self._parents[branch] = TableMeta.load(folder / "meta.json").parent_branch
        return self._parents[branch]

    def _sweep(self, wanted: Snapshot) -> None:
        """Removes what no generation of the last minute needs."""
        if time.monotonic() - self._swept < SWEEPING_SECONDS:
            return
        self._swept = time.monotonic()
        self._records.rest([*self.newest.tenants, *wanted.tenants])
        now, needed = time.monotonic(), {branch.folder for branch in self._tables}
        for folder in self.state.tables.glob("*/*"):
            if f"{folder.parent.name}/{folder.name}" in needed:
                self._unneeded.pop(folder, None)
            elif self._unneeded.setdefault(folder, now + REST_SECONDS) <= now:
                shutil.rmtree(folder, ignore_errors=True)
        for file in self.state.snapshots.glob("*"):
            if not file.name.isdecimal() or int(file.name) <= self.newest.generation - KEPT_SNAPSHOTS:
                file.unlink()
        self.state.forget_readers()
