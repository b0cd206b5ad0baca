"""Troubles that keep a copy behind its source. Each is said once when it begins, and once when it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hplm.errors import HplmError, kind_of
from hplm.follow.source import Absent, Away

SOON, LATER = 1.0, 10.0  # seconds until the next attempt: what may pass by itself, and what somebody has to mend


@dataclass(frozen=True)
class Trouble:
    says: str
    since: float  # Unix time


class Troubles:
    """Any thread may use it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._open: dict[str, Trouble] = {}

    def meet(self, about: str, error: Exception) -> None:
        says = str(error) if isinstance(error, HplmError) else kind_of(error)
        with self._lock:
            before = self._open.get(about)
            if before is not None and before.says == says:
                return
            since = before.since if before is not None else time.time()
            self._open[about] = Trouble(says, since)
        at = time.strftime("%F %T", time.localtime(since))
        self._say(f"{about}: {says}. What is here is served on; this is so since {at}")

    def mend(self, about: str) -> None:
        with self._lock:
            ended = self._open.pop(about, None)
        if ended is not None:
            self._say(f"{about}: this trouble has ended, after {time.time() - ended.since:,.0f} s")

    def worst(self) -> Trouble | None:
        """Returns the trouble that has lasted longest."""
        with self._lock:
            return min(self._open.values(), key=lambda trouble: trouble.since, default=None)

    @staticmethod
    def pause(error: Exception) -> float:
        return SOON if isinstance(error, Away | Absent) else LATER
