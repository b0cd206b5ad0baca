"""A served backbone: what was exported, under `model_repository/<backbone>/1`, and what was changed since, in its state.

Who serves a part of it reads through a view: one snapshot, its tables and its banks, which never change. A new generation is a
new view; a request ends on the one it started on.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from hplm.adapters.bank import WAY_OUT, Bank
from hplm.adapters.layout import Layout
from hplm.errors import Broken, Draining, HplmError
from hplm.model.config import BackboneConfig
from hplm.model.stacks import UpperStack
from hplm.model.tokenizer import Tokenizer
from hplm.model.weights import load_weights
from hplm.plot.forest import Forest
from hplm.plot.table import Table
from hplm.tenants.snapshot import LIVE, Snapshot
from hplm.tenants.state import (
    EXPORTED_BANKS,
    EXPORTED_CONFIG,
    EXPORTED_TABLES,
    EXPORTED_TENANTS,
    EXPORTED_TOKENIZER,
    EXPORTED_UPPER,
    SECONDS_BETWEEN_LOOKS,
    Reader,
    State,
)

log = logging.getLogger(__name__)
REMEMBERED = 16  # generations at most that a ticket on its way between the two models may still name
KEPT_SECONDS = 60.0  # after another took its place: longer than tickets are good


@dataclass(frozen=True, eq=False)
class View:
    snapshot: Snapshot
    forest: Forest
    banks: Mapping[str, Bank]  # by the name that records have; open, so that nobody can take them away


class Backbone:
    CONFIG = EXPORTED_CONFIG
    TOKENIZER = EXPORTED_TOKENIZER
    UPPER = EXPORTED_UPPER
    TENANTS = EXPORTED_TENANTS
    TABLES = EXPORTED_TABLES
    BANKS = EXPORTED_BANKS

    def __init__(self, folder: Path, state: Path | None = None, prepare: Callable[[Table], object] = lambda _: None) -> None:
        """`state` holds a folder a backbone; `prepare` opens what its user needs of a table, before the first request does."""
        self.folder = folder
        self.config = BackboneConfig.load(folder / self.CONFIG)
        self.state = State(state / self.config.name) if state is not None else None
        self._prepare = prepare
        self._lock = threading.Lock()
        self._seen: WeakSet[View] = WeakSet()  # those that requests in flight hold, and the remembered ones
        self._exported = Snapshot.load(folder / self.TENANTS)
        self._used: WeakKeyDictionary[View, float] = WeakKeyDictionary()  # when it was the newest, or asked for
        self._remembered: list[View] = []  # in the order of their generations; never changed, only replaced
        self._take(self._newest())

    @property
    def view(self) -> View:
        """The newest that was taken."""
        return self._remembered[-1]

    @property
    def layouts(self) -> set[Layout]:
        """Of all banks that a ticket may still name."""
        return {bank.layout for view in self._remembered for bank in view.banks.values()}

    def refresh(self) -> None:
        """Takes the newest generation if there is one, and forgets those that no ticket names any more."""
        with self._lock:
            self._used[self.view] = time.monotonic()
            if self.state is not None and self.state.current() != self.view.snapshot.generation:
                self._take(self._newest())
            self._forget()

    def at(self, generation: int) -> View:
        """The view that a ticket was written on; lookup may have seen a generation before we did, or one that we never saw."""
        if (found := self._known(generation)) is not None:
            return found
        self.refresh()
        with self._lock:
            if self._known(generation) is None and self.state is not None and self.state.has(generation):
                newest = self.view.snapshot
                self._take(self.state.load(generation))
                self._take(newest)  # batches are gathered from its forest, which now holds the tables of both
        if (found := self._known(generation)) is not None:
            return found
        raise Draining("what is served changed while the request was on its way: send it again")

    def _known(self, generation: int) -> View | None:
        return next((view for view in reversed(self._remembered) if view.snapshot.generation == generation), None)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer((self.folder / self.TOKENIZER).read_text("utf-8"), self.config.positions)

    def upper(self) -> UpperStack:
        upper = UpperStack(self.config)
        upper.load_state_dict(load_weights(self.folder / self.UPPER, WAY_OUT))
        return upper

    def bank(self, name: str) -> Bank:
        if name.startswith(LIVE):
            if self.state is None:
                raise Broken(f"bank {name} lies in a live state, and none was given: start with --state")
            return self.state.open_bank(name)
        return Bank(self.folder / self.BANKS / name)

    def _newest(self) -> Snapshot:
        if self.state is None or not (generation := self.state.current()):
            return self._exported
        snapshot = self.state.load(generation)
        if snapshot.export != self._exported.export:
            raise Broken(
                f"state {self.state.folder} belongs to another export of {self.config.name!r} than {self.folder}: "
                "serve it with the repository it was made for, or start with an empty --state"
            )
        return snapshot

    def _take(self, snapshot: Snapshot) -> None:
        before = self.view if self._remembered else None
        folders = [self.folder / self.TABLES]
        if self.state is not None:
            folders.append(self.state.tables)
        # Tables that requests in flight still need stay in the forest, whatever the new snapshot says.
        branches = dict.fromkeys(snapshot.branches)
        for view in self._seen:
            branches.update(dict.fromkeys(view.snapshot.branches))
        forest = Forest(folders, branches, self._prepare, before.forest if before else None)
        for failure in forest.failures():
            log.error("%s", failure)
        view = View(snapshot, forest, self._banks(snapshot, before))
        self._seen.add(view)
        self._used[view] = time.monotonic()
        by_generation = {view.snapshot.generation: view for view in (*self._remembered, view)}
        self._remembered = [by_generation[generation] for generation in sorted(by_generation)][-REMEMBERED:]

    def _forget(self) -> None:
        """Tables and banks of views that are gone are closed, so that what was deleted is off the disk."""
        since = time.monotonic() - KEPT_SECONDS
        kept = [view for view in self._remembered if view is self.view or self._used[view] > since]
        if len(kept) < len(self._remembered):
            self._remembered = kept
            self._take(self.view.snapshot)

    def _banks(self, snapshot: Snapshot, before: View | None) -> dict[str, Bank]:
        """All that can be opened: what cannot fails the tenants in it, when they are asked, and not the others."""
        banks = {}
        for name in snapshot.banks():
            try:
                banks[name] = (before.banks.get(name) if before is not None else None) or self.bank(name)
            except HplmError as error:
                log.error("%s", error)
        return banks


class Watch:
    """Takes new generations as they are published, and says so to managers where it may write.

    In two threads: who is long about taking one, as the index of a huge table is checked, is late and not gone.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        if backbone.state is not None:
            self._reader = Reader(backbone.state)
            self._threads = [
                threading.Thread(target=self._take, name="watch", daemon=True),
                threading.Thread(target=self._tell, name="heartbeat", daemon=True),
            ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._threads:
            self._reader.close()

    def _take(self) -> None:
        said = ""
        while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
            try:
                self._backbone.refresh()
                said = ""
            except Exception as error:  # the generation we have is served on, and managers are to know that it is
                if str(error) != said:
                    said = str(error)
                    log.error("the newest generation cannot be taken: %s", error)

    def _tell(self) -> None:
        said = ""
        while True:
            try:
                self._reader.say(self._backbone.view.snapshot.generation)
                said = ""
            except OSError as error:
                if isinstance(error, PermissionError) or error.errno == errno.EROFS:
                    log.info("managers are not told which generation is served here: %s", error)
                    return
                if str(error) != said:  # a full disk, perhaps, and not for ever
                    said = str(error)
                    log.warning("managers cannot be told which generation is served here: %s", error)
            if self._stop.wait(SECONDS_BETWEEN_LOOKS):
                return
