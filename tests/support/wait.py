"""Waiting for what another thread or process does, and a time that only tests move."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 180.0  # seconds; only a failing test takes as long


def eventually(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Returns when the condition holds. Fails if it never does."""
    ends, pause = time.monotonic() + patience, 0.001
    while not condition():
        assert time.monotonic() < ends, f"it has not come true in {patience:g} s"
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


def stop(pid: int) -> None:
    """Stops a process, and returns when all its threads stand still. The signal alone stops them a little later."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()))


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it has ended
        return "X"


class Clock:
    """A clock for `clock=` or a patched `time`: it moves only when a test moves it, or when somebody sleeps by it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.set_by = 0.0  # seconds by which somebody has set the wall clock ahead

    def monotonic(self) -> float:
        return self.seconds

    perf_counter = process_time = monotonic

    def time(self) -> float:
        return self.seconds + self.set_by

    def monotonic_ns(self) -> int:
        return round(self.seconds * 1e9)

    time_ns = perf_counter_ns = __call__ = monotonic_ns

    def clock_gettime(self, clock: int) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Hold:
    """Holds whoever passes until a test lets them go. `with hold: ...` lets everybody go at its end, even if it fails."""

    def __init__(self) -> None:
        self._reached, self._free = threading.Semaphore(0), threading.Semaphore(0)
        self._open = False

    def pass_through(self) -> None:
        """Called by what shall be held."""
        self._reached.release()
        if not self._open:
            assert self._free.acquire(timeout=PATIENCE), "nobody let it go"

    def until_reached(self) -> None:
        """Returns when one more has come."""
        assert self._reached.acquire(timeout=PATIENCE), "nobody came"

    def let_one_go(self) -> None:
        self._free.release()

    def open(self) -> None:
        """Lets everybody go, from now on."""
        self._open = True
        self._free.release(1_000)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
