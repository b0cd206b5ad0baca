"""The servers that read a copy."""

from __future__ import annotations

import time
from collections.abc import Callable

from hplm.tenants.registry import KEPT_SNAPSHOTS
from hplm.tenants.state import SILENT_SECONDS, STILL_SECONDS, UNSEEN_SECONDS, State


class Readers:
    """They get the same time to take a generation as managers give the readers of their own machine."""

    def __init__(self, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._looked = clock()
        self._ran = 0.0  # seconds, without those in which the whole machine was stopped
        self._found: dict[int, float] = {}  # when each generation was first seen here

    def taken(self, newest: int, now: float) -> list[int]:
        """Returns generations that are served, the oldest one among them. -1: nobody can tell. `newest`: of the copy."""
        looked = self._clock()
        self._ran, self._looked = self._ran + min(looked - self._looked, STILL_SECONDS), looked
        self._found = {generation: ran for generation, ran in self._found.items() if generation > newest - KEPT_SNAPSHOTS}
        self._found.setdefault(newest, self._ran)
        readers = self._state.taken(now)
        if not readers:
            return [self._after(UNSEEN_SECONDS)]
        silent = self._after(SILENT_SECONDS)
        return [max(taken.whole, silent) if taken.is_silent else taken.whole for taken in readers]

    def _after(self, seconds: float) -> int:
        """Returns the newest generation that was here for so long."""
        old = [generation for generation, found in self._found.items() if self._ran - found >= seconds]
        return max(old, default=-1)
