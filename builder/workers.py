"""Processes that work side by side, as many as the machine has room for, and end when the one that started them does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

BYTES_EACH = 2 << 30  # of memory, that a training takes at most


def room(wanted: int) -> int:
    """How many trainings fit on this machine at a time."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    available = 1024 * int(told["MemAvailable"].split()[0])
    return max(1, min(wanted, len(os.sched_getaffinity(0)), available // BYTES_EACH))


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """An error, or Ctrl-C, and what has not begun is not begun any more."""
    pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _end_with_parent() -> None:
    """A pool whose owner was killed would wait for work for ever."""

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch, name="parent", daemon=True).start()
