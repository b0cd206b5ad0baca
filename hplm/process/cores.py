"""Among how many threads an engine divides a product: fewer while other programs use its cores."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hplm.model.cpu import compute_with

log = logging.getLogger(__name__)
JUDGED_S = 0.02  # so much computing is judged together
DELAYED = 0.5  # of this time the threads have waited for a core, or more: other programs use it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 64.0  # until more threads are tried again


def delayed_ns() -> int:
    """Returns how long the calling thread, and those among which it divides products, were ready to run, but had no core."""
    others = {str(thread.native_id) for thread in threading.enumerate()} - {str(threading.get_native_id())}
    delayed = 0
    for task in os.listdir("/proc/self/task"):
        if task not in others:  # OpenMP's threads are not among Python's
            with suppress(ProcessLookupError, FileNotFoundError), open(f"/proc/self/task/{task}/schedstat") as file:
                delayed += int(file.read().split()[1])
    return delayed


class Cores:
    """Surrounds what a thread computes. Half as many threads divide it after others have taken their cores.

    A product ends when its slowest part does. A thread whose core another program uses begins its part some milliseconds later,
    at each of a batch's products: one busy program makes a small batch take tens of times as long. Fewer threads find cores.
    """

    def __init__(
        self,
        threads: int,
        delayed_ns: Callable[[], int] = delayed_ns,
        now: Callable[[], float] = time.monotonic,
        divide: Callable[[int], object] = compute_with,
    ) -> None:
        """`threads`: as many as there are cores for. `divide` is called with the number of threads when it changes."""
        self._most = self.threads = threads
        self._delayed_ns, self._now, self._divide = delayed_ns, now, divide
        self._pause_s, self._more_at = FIRST_PAUSE_S, 0.0
        self._began = self._computed_s = 0.0
        self._delayed = delayed_ns() if threads > 1 else 0
        if threads > 1 and not os.path.exists("/proc/self/schedstat"):
            log.info("this system does not say how long threads wait for cores: other programs may slow small batches down")

    def __enter__(self) -> None:
        self._began = self._now()
        if self.threads < self._most and self._began >= self._more_at:
            self._set(min(2 * self.threads, self._most), self._began)
            self._delayed, self._computed_s = self._delayed_ns(), 0.0

    def __exit__(self, *_: object) -> None:
        now = self._now()
        self._computed_s += now - self._began
        if self.threads > 1 and self._computed_s >= JUDGED_S:
            self._judge(now)

    def _judge(self, now: float) -> None:
        delayed = self._delayed_ns()
        share = (delayed - self._delayed) / 1e9 / self._computed_s
        self._delayed, self._computed_s = delayed, 0.0
        if share >= DELAYED:
            if self.threads == self._most:
                log.warning("other programs use the cores: fewer than %d threads divide small batches", self._most)
            self._set(self.threads // 2, now)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif self.threads == self._most and now >= self._more_at:  # they have had their cores for as long as the pause was
            self._pause_s = FIRST_PAUSE_S

    def _set(self, threads: int, now: float) -> None:
        self.threads, self._more_at = threads, now + self._pause_s
        self._divide(threads)
