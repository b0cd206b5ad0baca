"""Processes that work side by side, as many as the machine has room for, and end when the one that started them does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread

from hplm.errors import HplmError

BYTES_EACH = 2 << 30  # of memory, that a training takes at most


def processes_that_fit(wanted: int) -> int:
    """How many trainings fit on this machine at a time."""
    return max(1, min(wanted, len(os.sched_getaffinity(0)), _available() // BYTES_EACH))


def _available(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory: the machine's, or what a container is left of its own, pages of files not counted."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    available = 1024 * int(told["MemAvailable"].split()[0])
    try:
        limit, used = ((group / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except FileNotFoundError:  # no container, or an older kernel's
        return available
    return available if limit == "max" else min(available, int(limit) - int(used) + int(pages["inactive_file"]))


@contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """An error, or Ctrl-C, ends them all at once: what they do goes on from savepoints, and nobody may write there unseen."""
    context = get_context("spawn")
    told, line = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, initializer=_end_with_owner, initargs=(told,))
    try:
        yield pool
    except BaseException as error:
        line.close()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise HplmError(
                "a training was ended from outside, for want of memory perhaps: the same command goes on from what is done; "
                "see that it has more"
            ) from error
        raise
    else:
        pool.shutdown()  # when all that was given is done
    finally:
        line.close()
        told.close()


def _end_with_owner(told: Connection) -> None:
    """Whether it was killed, which leaves a pool waiting for work for ever, or hangs up."""

    def watch() -> None:
        wait([parent_process().sentinel, told])
        os._exit(1)

    Thread(target=watch, name="owner", daemon=True).start()
