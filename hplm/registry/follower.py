"""Follows CURRENT of a registry: what it said last, since when that is taken over, and when what failed is tried again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from hplm.clock import Clock
from hplm.registry import lease
from hplm.registry.pointer import HasCurrent, Pointer, read_current
from hplm.registry.store import Absent, not_begun

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds until what failed is tried again: it may be large
ENDING_SECONDS = 5.0  # a folder that hangs keeps its thread, and nobody waits longer for that


class Unchanged:
    """In place of the registry of a server without a state: nothing changes after the export."""

    def current(self, seen: Any = None) -> tuple[bytes, Any] | None:
        return (Pointer(0, "").written(), True) if seen is None else None


class Follower:
    """Only one thread at a time may look. It may hang as long as the store does, so requests never look themselves."""

    pointer: Pointer  # what CURRENT said last

    def __init__(
        self,
        store: HasCurrent,
        take: Callable[[Pointer], bool],
        clock: Clock = time,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        """`take` takes over what CURRENT says, and returns whether that is whole. It is called again until it is."""
        self._store = store
        self._take = take
        self._time = clock
        self._longest_pause = longest_pause
        self._tag: Any = None  # of the CURRENT that was read last
        self._pause, self._again = 0.0, 0.0  # before the next try, and when that is
        self.is_behind = True  # whether CURRENT says what could not be taken
        self.is_whole = False
        self.seen_at = float("-inf")  # when CURRENT was read last of which all was taken, by the time since the boot

    def look(self) -> bool:
        """Reads CURRENT, and takes over what is new. Returns whether nothing is left to be tried again. It may raise."""
        asked = lease.boot_time(self._time)
        try:
            found = read_current(self._store, self._tag)
        except Absent:
            raise not_begun(self._store) from None
        now = self._time.monotonic()
        if found is not None:
            self.pointer, self._tag = found
            self.is_behind, self.is_whole = True, False
            self._pause, self._again = min(FIRST_PAUSE, self._longest_pause), now
        if not self.is_whole and now >= self._again:
            self._again, self._pause = now + self._pause, min(2 * self._pause, self._longest_pause)
            self.is_whole = self._take(self.pointer)
            self.is_behind = False
        if not self.is_behind:
            self.seen_at = asked
        return self.is_whole


class Looking:
    """Looks, and logs a failure once. Once it is started, a thread of its own does so again and again."""

    def __init__(self, look: Callable[[], bool | None], failed: str) -> None:
        """`look` returns False while it waits to try again what has failed. `failed`: for the log."""
        self._look, self._failed = look, failed
        self._said = ""
        self._wake, self._ends = threading.Event(), False
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        try:
            if self._look() is not False and self._said:
                self._said = ""
                log.info("%s: that has passed", self._failed)
        except Exception as error:  # what was taken last stays in use
            if str(error) != self._said:
                self._said = str(error)
                log.error("%s: %s", self._failed, error)

    def start(self, every_s: float, name: str) -> Looking:
        self._thread = threading.Thread(target=self._run, args=(every_s,), name=name, daemon=True)
        self._thread.start()
        return self

    def soon(self) -> None:
        """Lets the thread look at once."""
        self._wake.set()

    def close(self) -> None:
        self._ends = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(ENDING_SECONDS)

    def _run(self, every_s: float) -> None:
        while not self._ends:
            self.look()
            self._wake.wait(every_s)
            self._wake.clear()
