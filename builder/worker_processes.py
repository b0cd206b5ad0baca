"""Worker processes: as many as fit on the machine. They end when the process that started them ends."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread

from hplm.errors import HplmError

BYTES_EACH = 2 << 30  # the most memory that one training takes


def processes_that_fit(wanted: int, bytes_each: int = BYTES_EACH, waiting: int = 0) -> int:
    """Returns how many processes fit on this machine at a time, at most `wanted`. Without `bytes_each` they are trainings.

    `waiting`: how many of them wait for something most of the time, and need no core of their own.
    """
    return max(1, min(wanted, len(os.sched_getaffinity(0)) + waiting, _available() // bytes_each))


def _available(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the free bytes of the machine or, in a container, of its limit. Cached file pages count as free."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    available = 1024 * int(told["MemAvailable"].split()[0])
    try:
        limit, used = ((group / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except FileNotFoundError:  # no container, or an older kernel
        return available
    return available if limit == "max" else min(available, int(limit) - int(used) + int(pages["inactive_file"]))


@contextmanager
def worker_processes(count: int) -> Generator[ProcessPoolExecutor, None, None]:
    """A pool of processes. An error or Ctrl-C ends all of them at once, since their work continues from savepoints."""
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
                "a training process was killed, perhaps because memory ran out. Give it more memory and run the same command: "
                "it continues from what is done"
            ) from error
        raise
    else:
        pool.shutdown()  # once all tasks are done
    finally:
        line.close()
        told.close()


def _end_with_owner(told: Connection) -> None:
    """Ends this process when its owner is killed or closes the pipe; otherwise the pool would wait for work for ever."""

    owner = parent_process()
    assert owner is not None  # this is a worker

    def watch() -> None:
        wait([owner.sentinel, told])
        os._exit(1)

    Thread(target=watch, name="owner", daemon=True).start()
