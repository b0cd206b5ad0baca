"""A served backbone: its export under `model_repository/<backbone>/1`, and later changes from its state.

Both models read it through a view: one snapshot with its tables, which never change. A new generation is a new view.
A request ends on the view that it started on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from hplm.clock import Clock
from hplm.errors import Broken, Draining
from hplm.model.config import BackboneConfig
from hplm.model.tokenizer import Tokenizer
from hplm.plot.forest import Forest
from hplm.plot.table import Table
from hplm.registry import lease
from hplm.registry.store import Place, Remote, local, not_begun, opened
from hplm.tenants.filter import filtered
from hplm.tenants.mirror import SECONDS_BETWEEN_LOOKS as SECONDS_BETWEEN_COPIES
from hplm.tenants.mirror import Mirror
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state import (
    EXPORTED_CONFIG,
    EXPORTED_TABLES,
    EXPORTED_TENANTS,
    EXPORTED_TOKENIZER,
    SECONDS_BETWEEN_LOOKS,
    Reader,
    State,
    may_not_write,
)

log = logging.getLogger(__name__)
REMEMBERED = 16  # the most generations that tickets between the two models may name
LONGEST_PAUSE = 10.0  # seconds between two tries to open what could not be opened
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
        state: Place | None = None,
        prepare: Callable[[Table], object] = lambda _: None,
        clock: Clock = time,
    ) -> None:
        """`state` has a registry for each backbone. `prepare` opens the needed parts of a table before the first request."""
        self.folder = folder
        self._time = clock
        self.config = BackboneConfig.load(folder / self.CONFIG)
        self.state = State(local(state) / self.config.name) if state is not None else None
        self.mirror: Mirror | None = None  # of a bucket
        if isinstance(state, Remote) and self.state is not None:
            self.mirror = Mirror(folder, opened(state / self.config.name), self.state, clock)
            self.mirror.begin()
        self._seen_at, self._lease_s = 0.0, math.inf
        self._prepare = prepare
        self._lock = threading.Lock()
        self._exported = filtered(Snapshot.load(folder / self.TENANTS), folder)
        # When each view that a request holds, or that is remembered, was last the newest or needed.
        self._used: WeakKeyDictionary[View, float] = WeakKeyDictionary()
        self._remembered: dict[int, View] = {}  # by generation, in their order; it is replaced, never changed
        self.view: View  # the newest one that was opened
        self._read = self._current()  # the generation that CURRENT named last
        self.is_behind = False  # whether that one is newer than the view, and could not be opened
        self._pause, self._again = SECONDS_BETWEEN_LOOKS, self._time.monotonic()  # before the next try, and when that is
        self._take(self._snapshot(self._read))

    def refresh(self) -> None:
        """Opens the newest generation if it is new, and forgets views that no ticket can name any more.

        What could not be opened is tried again after pauses that grow, because its files may have been put right. Nothing else
        is read twice: at thousands of tenants a snapshot takes a third of a second.
        """
        with self._lock:
            now = self._used[self.view] = self._time.monotonic()
            if (generation := self._current()) != self._read:
                served = self.view.snapshot.generation
                self._read, self.is_behind = generation, generation > served
                self._pause, self._again = SECONDS_BETWEEN_LOOKS, now
                if generation < served:
                    log.warning(
                        "the state of %s is back at generation %d, but %d is still served: restore it, or restart to go back",
                        self.config.name, generation, served,
                    )  # fmt: skip
            if now >= self._again and (self.is_behind or self.view.forest.failures()):
                self._again, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
                self._take(self._snapshot(self._read) if self.is_behind else self.view.snapshot)
                self.is_behind = False
            self._forget()

    def catch_up(self) -> None:
        """Takes what has changed since it was made: an engine may have taken long to open."""
        try:
            if self.mirror is not None:
                self.mirror.look()
            self.refresh()
        except Exception as error:  # `Watch` tries again
            log.error("cannot open the newest generation: %s", error)

    def is_open(self, generation: int) -> bool:
        """Whether `at` returns this generation without reading files."""
        return generation in self._remembered

    def at(self, generation: int) -> View:
        """Returns the view that a ticket names. Opens it if lookup has seen a generation that this process has not."""
        if (found := self._remembered.get(generation)) is not None:
            return found
        with self._lock:
            if generation not in self._remembered and self.state is not None and self.state.has(generation):
                newest = self.view.snapshot
                self._take(self._snapshot(generation))
                if generation < newest.generation:
                    self._take(newest)  # batches are gathered from its forest, which now has the tables of both
        if (found := self._remembered.get(generation)) is not None:
            return found
        raise Draining("the served tenants or tables changed while the request was on its way: send it again")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / self.TOKENIZER, self.config.positions)

    @property
    def age(self) -> float:
        """The seconds since the registry was seen. Without one: 0."""
        return lease.boot_time(self._time) - self._seen_at if self.state is not None else 0.0

    @property
    def is_stale(self) -> bool:
        """Whether a key may be valid here that was revoked long ago."""
        return self.state is not None and self.age > self._lease_s

    def _current(self) -> int:
        if self.state is None:
            return 0
        asked, pointer = lease.boot_time(self._time), self.state.pointer()
        if pointer is None:
            raise not_begun(self.state.folder)
        self._lease_s = pointer.lease_s
        if not self._remembered or pointer.generation >= self.view.snapshot.generation:  # otherwise it is not what is served
            self._seen_at = asked if self.mirror is None else lease.load(self.state.seen)
        return pointer.generation

    def _snapshot(self, generation: int) -> Snapshot:
        if self.state is None or not generation:
            return self._exported
        snapshot = self.state.load(generation)
        if snapshot.export != self._exported.export:
            raise Broken(
                f"state {self.state.folder} belongs to another export of {self.config.name!r} than {self.folder}: "
                "serve it with the repository that it was made for, or start with an empty --state"
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


class Watch:
    """Opens new generations as they are published, and reports the opened generation to managers, where it may write.

    It has a thread for each. Opening may take long, for example to check the index of a huge table. Meanwhile the other thread
    shows managers that this reader is alive.
    """

    def __init__(self, views: Views) -> None:
        self._views = views
        self._stop = threading.Event()
        self._reader = Reader(views.state) if views.state is not None else None
        self._threads = [threading.Thread(target=self._take, name="watch", daemon=True)]
        if views.mirror is not None:
            self._threads.append(threading.Thread(target=self._copy, args=(views.mirror,), name="mirror", daemon=True))
        if self._reader is not None:
            self._threads.append(threading.Thread(target=self._tell, args=(self._reader,), name="heartbeat", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._reader is not None:
            self._reader.close()
        if self._views.mirror is not None:
            self._views.mirror.close()

    def _copy(self, mirror: Mirror) -> None:
        """Looks at the bucket, after a failure sooner. What is not here yet is served as it was, as long as the lease says."""
        said = ""
        while not self._stop.wait(SECONDS_BETWEEN_COPIES / (2 if said else 1)):
            try:
                mirror.look()
                if said:
                    log.info("the registry is seen again")
                said = ""
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    log.error("cannot copy the newest generation: %s", error)

    def _take(self) -> None:
        said = ""
        while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
            try:
                self._views.refresh()
                said = said if self._views.is_behind else ""
            except Exception as error:  # the old generation is still served, and managers must still see that
                if str(error) != said:
                    said = str(error)
                    log.error("cannot open the newest generation: %s", error)

    def _tell(self, reader: Reader) -> None:
        said = ""
        while True:
            try:
                reader.say(self._views.view.snapshot.generation)
                said = ""
            except OSError as error:
                if may_not_write(error):
                    log.info("this server does not report its generation to managers: %s", error)
                    return
                if str(error) != said:  # it may pass, as a full disk does
                    said = str(error)
                    log.warning("cannot report this server's generation to managers: %s", error)
            if self._stop.wait(SECONDS_BETWEEN_LOOKS):
                return
