"""Threads that nothing ends but their own last step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE = 0.05  # seconds after an exception, so that a step that always fails does not fill the log at once


class Beats:
    """Counts how many beats pieces of work have lasted. A clock would count the time in which all processes are paused."""

    def __init__(self) -> None:
        self._lasted: dict[float, int] = {}  # by the begin of a piece

    def count(self, begun: Iterable[float]) -> int:
        """Counts a beat, in which these pieces are under way. Returns the beats of the one that has lasted longest."""
        self._lasted = {since: self._lasted.get(since, -1) + 1 for since in begun}
        return max(self._lasted.values(), default=0)


class Threads(Generic[T]):
    """Threads that do what others put in, one thing after the other."""

    def __init__(self, do: Callable[[T], object], name: str, count: int = 1) -> None:
        self.count = count
        self._do = do
        self._waiting: SimpleQueue[T | None] = SimpleQueue()
        self._threads = [repeat(self._do_next, name) for _ in range(count)]

    def __len__(self) -> int:
        return self._waiting.qsize()

    def put(self, one: T) -> None:
        self._waiting.put(one)

    def close(self) -> None:
        """Returns when all has been done."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _do_next(self) -> bool:
        one = self._waiting.get()
        if one is not None:
            self._do(one)
        return one is not None


def repeat(step: Callable[[], bool], name: str, first: Callable[[], None] = lambda: None) -> threading.Thread:
    """Starts a thread that calls `first`, and then `step` until that returns False.

    An exception is logged, and the next step follows.
    """
    thread = threading.Thread(target=_run, args=(step, name, first), name=name, daemon=True)
    thread.start()
    return thread


def _run(step: Callable[[], bool], name: str, first: Callable[[], None]) -> None:
    try:
        first()
    except Exception:
        log.exception("the thread %r could not be prepared", name)
    while True:
        try:
            if not step():
                return
        except Exception:
            log.exception("a step of the thread %r failed", name)
            time.sleep(PAUSE)
