"""Threads that nothing ends but their own last step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import T

log = logging.getLogger(__name__)
PAUSE = 0.05  # seconds after an exception, so that a step that always fails does not fill the log at once


def repeat(step: Callable[[], bool], name: str, first: Callable[[], None] = lambda: None) -> threading.Thread:
    """Starts a thread that calls `first`, and then `step` until that returns False.

    An exception is logged, and the next step follows.
    """
    thread = threading.Thread(target=_run, args=(step, name, first), name=name, daemon=True)
    thread.start()
    return thread


class Runner:
    """The clock, the line and the threads of a service. Tests give another one, which goes on step by step."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def line(self, scheduler: Scheduler[T]) -> Queue[T]:
        return Queue(scheduler, self.now_ns)

    def repeat(self, step: Callable[[], bool], name: str, first: Callable[[], None] = lambda: None) -> threading.Thread:
        return repeat(step, name, first)

    def beside(self, name: str) -> Executor:
        """Returns what runs calls one after the other, beside the other threads."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)


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
