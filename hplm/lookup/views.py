"""A served backbone: its export under `model_repository/<backbone>/1`, and later changes from its state.

Both models read it through a view: one snapshot with its tables, which never change. A new generation is a new view.
A request ends on the view that it started on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from hplm.clock import Clock
from hplm.errors import Broken, Draining
from hplm.location import Location, Remote, local_folder
from hplm.model.config import BackboneConfig
from hplm.model.tokenizer import Tokenizer
from hplm.plot.forest import Forest
from hplm.plot.table import Table
from hplm.registry import lease
from hplm.registry.folder import Folder
from hplm.registry.follower import Follower, Looking, Unchanged
from hplm.registry.opening import opened
from hplm.registry.pointer import Pointer
from hplm.tenants.filter import filtered
from hplm.tenants.mirror import SECONDS_BETWEEN_LOOKS as SECONDS_BETWEEN_COPIES
from hplm.tenants.mirror import Mirror
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import (
    EXPORTED_CONFIG,
    EXPORTED_TABLES,
    EXPORTED_TENANTS,
    EXPORTED_TOKENIZER,
    SECONDS_BETWEEN_LOOKS,
    ReaderFile,
    StateFolder,
)

log = logging.getLogger(__name__)
REMEMBERED = 16  # the most generations that tickets between the two models may name
OPENING_SECONDS = 20.0  # for which requests wait until a generation is open: tickets are valid for a little longer
KEPT_SECONDS = 60.0  # how long a replaced view is kept: longer than tickets are valid


@dataclass(frozen=True, eq=False)
class View:
    snapshot: Snapshot
    forest: Forest


class Views:
    """The views of a served backbone, one after the other. No torch here: lookup starts without it."""

    CONFIG = EXPORTED_CONFIG
    TOKENIZER = EXPORTED_TOKENIZER
    TENANTS = EXPORTED_TENANTS
    TABLES = EXPORTED_TABLES

    def __init__(
        self,
        folder: Path,
        state: Location | None = None,
        prepare: Callable[[Table], object] = lambda _: None,
        clock: Clock = time,
    ) -> None:
        """`state` has a registry for each backbone. `prepare` opens the needed parts of a table before the first request."""
        self.folder = folder
        self._time = clock
        self.config = BackboneConfig.load(folder / self.CONFIG)
        self.state = StateFolder(local_folder(state) / self.config.name) if state is not None else None
        self.mirror: Mirror | None = None  # of a bucket
        if isinstance(state, Remote) and self.state is not None:
            self.mirror = Mirror(folder, opened(state / self.config.name), self.state, clock)
            self.mirror.begin()
        self._seen_at = 0.0
        self.generation = 0  # of the registry, whose keys and deletions hold here
        self._prepare = prepare
        self._lock = threading.Lock()
        self._exported = filtered(Snapshot.load(folder / self.TENANTS), folder)
        # When each view that a request holds, or that is remembered, was last the newest or needed.
        self._used: WeakKeyDictionary[View, float] = WeakKeyDictionary()
        self._remembered: dict[int, View] = {}  # by generation, in their order; it is replaced, never changed
        self.view: View  # the newest one that was opened
        self.soon: Callable[[], None] | None = None  # lets the thread that refreshes do so at once; None: there is none
        self._asked: dict[int, float] = {}  # generations that requests wait for, and since when
        self._opened = threading.Condition()
        self._follower = Follower(Folder(self.state.folder) if self.state is not None else Unchanged(), self._follow, clock)
        self._look()

    def refresh(self) -> bool:
        """Opens the newest generation if it is new, and forgets views that no ticket can name any more. One thread does so.

        What could not be opened is tried again after pauses that grow, because its files may have been put right. Nothing else
        is read twice: at thousands of tenants a snapshot takes a third of a second. Returns False before such a try.
        """
        with self._lock:
            self._used[self.view] = self._time.monotonic()
            try:
                return self._look()
            finally:
                self._open_asked()
                self._forget()

    def catch_up(self) -> None:
        """Takes what has changed since it was made: an engine may have taken long to open."""
        try:
            if self.mirror is not None:
                self.mirror.look()
            self.refresh()
        except Exception as error:  # `RegistryWatcher` tries again
            log.error("cannot open the newest generation: %s", error)

    def is_open(self, generation: int) -> bool:
        """Whether `at` returns this generation without waiting."""
        return generation in self._remembered

    def at(self, generation: int) -> View:
        """Returns the view that a ticket names. If only lookup has seen the generation, waits for the thread that opens it.

        It reads no files: a folder that hangs keeps that thread, and all who wait for the generation are refused together.
        """
        if (found := self._remembered.get(generation)) is None and self.soon is not None:
            with self._opened:
                ends = self._asked.setdefault(generation, time.monotonic()) + OPENING_SECONDS
                self.soon()
                self._opened.wait_for(lambda: generation in self._remembered, max(0.0, ends - time.monotonic()))
            found = self._remembered.get(generation)
        if found is None:
            raise Draining("the served tenants or tables changed while the request was on its way: send it again")
        return found

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / self.TOKENIZER, self.config.positions)

    @property
    def age(self) -> float:
        """The seconds since the registry was seen whose newest tenants are served. Without one: 0."""
        return lease.boot_time(self._time) - self._seen_at if self.state is not None else 0.0

    @property
    def is_stale(self) -> bool:
        """Whether a key may be valid here that was revoked long ago."""
        return self.state is not None and self.age > self._follower.pointer.lease_s

    @property
    def is_behind(self) -> bool:
        """Whether the newest generation could not be opened."""
        return self._follower.is_behind

    def _look(self) -> bool:
        copy = self.state if self.mirror is not None else None
        seen = lease.load(copy.seen) if copy is not None else None  # before: the copy may be changed meanwhile
        is_whole, pointer = self._follower.look(), self._follower.pointer
        if not self.is_behind and pointer.generation >= self.view.snapshot.generation:  # otherwise it is not what is served
            self._seen_at = self._follower.seen_at if seen is None else seen
            self.generation = pointer.generation if pointer.copied is None else pointer.copied.generation
        return is_whole

    def _follow(self, pointer: Pointer) -> bool:
        """Opens a generation. Returns whether all of its tables are open."""
        if not self._remembered or pointer.generation > self.view.snapshot.generation:
            self._take(self._snapshot(pointer.generation))
        elif pointer.generation < self.view.snapshot.generation:
            log.warning(
                "the state of %s is back at generation %d, but %d is still served: restore it, or restart to go back",
                self.config.name, pointer.generation, self.view.snapshot.generation,
            )  # fmt: skip
        elif self.view.forest.failures():
            self._take(self.view.snapshot)
        return not self.view.forest.failures()

    def _open_asked(self) -> None:
        """Opens the generations that requests wait for."""
        since = time.monotonic() - KEPT_SECONDS
        with self._opened:
            self._asked = {generation: asked for generation, asked in self._asked.items() if asked > since}
        for generation in [*self._asked]:
            if generation not in self._remembered and self.state is not None and self.state.has(generation):
                newest = self.view.snapshot
                self._take(self._snapshot(generation))
                if generation < newest.generation:
                    self._take(newest)  # batches are gathered from its forest, which now has the tables of both
        with self._opened:
            self._opened.notify_all()

    def _snapshot(self, generation: int) -> Snapshot:
        if self.state is None or not generation:
            return self._exported
        snapshot = self.state.load(generation)
        if snapshot.export != self._exported.export:
            raise Broken(
                f"state {self.state.folder} belongs to another export of {self.config.name!r} than {self.folder}: "
                "serve it with the repository that it was made for, or go on from it with `hplm begin --from`"
            )
        return filtered(snapshot, self.folder)

    def _take(self, snapshot: Snapshot) -> None:
        before = self.view if self._remembered else None
        folders = [self.folder / self.TABLES]
        if self.state is not None:
            folders.append(self.state.tables)
        # Tables that requests in flight still need stay in the forest, even if the new snapshot does not have them.
        branches = dict.fromkeys(snapshot.branches)
        for view in list(self._used):
            branches.update(dict.fromkeys(view.snapshot.branches))
        forest = Forest(folders, branches, self._prepare, before.forest if before else None)
        said = set(map(str, before.forest.failures())) if before else set[str]()
        for failure in set(map(str, forest.failures())) - said:
            log.error("%s", failure)
        view = View(snapshot, forest)
        self._used[view] = self._time.monotonic()
        remembered = {**self._remembered, snapshot.generation: view}
        generations = sorted(remembered)[-REMEMBERED:]
        self._remembered = {generation: remembered[generation] for generation in generations}
        self.view = remembered[generations[-1]]

    def _forget(self) -> None:
        """Forgets old views and closes their tables, so that deleted files leave the disk."""
        since = self._time.monotonic() - KEPT_SECONDS
        views = self._remembered.items()
        kept = {generation: view for generation, view in views if view is self.view or self._used[view] > since}
        if len(kept) < len(self._remembered):
            self._remembered = kept
            self._take(self.view.snapshot)


class RegistryWatcher:
    """Opens new generations as they are published, and reports the opened generation to managers, where it may write.

    It has a thread for each. Opening may take long, for example to check the index of a huge table. Meanwhile the other thread
    shows managers that this reader is alive.
    """

    def __init__(self, views: Views) -> None:
        self._mirror = views.mirror
        self._reader = ReaderFile(views.state) if views.state is not None else None
        opening = Looking(views.refresh, "cannot open the newest generation").start(SECONDS_BETWEEN_LOOKS, "watch")
        self._looking, views.soon = [opening], opening.soon
        if self._mirror is not None:
            copying = Looking(self._mirror.look, "cannot copy the newest generation")
            self._looking.append(copying.start(SECONDS_BETWEEN_COPIES, "mirror"))
        if (reader := self._reader) is not None:
            telling = Looking(
                lambda: reader.report(views.view.snapshot.generation), "cannot report this server's generation to managers"
            )
            self._looking.append(telling.start(SECONDS_BETWEEN_LOOKS, "heartbeat"))

    def close(self) -> None:
        for looking in self._looking:
            looking.close()
        if self._reader is not None:
            self._reader.close()
        if self._mirror is not None:
            self._mirror.close()
