"""Processes that work side by side, as many as the machine has room for, and end when the one that started them does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
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
    """An error, or Ctrl-C, ends them all at once: what they do goes on from savepoints, and nobody may write there unseen."""
    context = get_context("spawn")
    told, line = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, initializer=_end_with_owner, initargs=(told,))
    try:
        yield pool
    except BaseException:
        line.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        line.close()
        told.close()


def _end_with_owner(told: Connection) -> None:
    """Whether it was killed, which leaves a pool waiting for work for ever, or hangs up."""

    def watch() -> None:
        wait([parent_process().sentinel, told])
        os._exit(1)

    Thread(target=watch, name="owner", daemon=True).start()
