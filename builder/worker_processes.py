"""Worker processes, which end when the process that started them ends."""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import ParamSpec, TypeVar

from builder.console import say
from hplm.errors import HplmError, kind_of

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G")
BYTES_EACH = 2 << 30  # the most memory that one training takes
KILLED = (
    "its process was killed twice, the second time when no other one ran, perhaps because memory ran out: build it alone with "
    "more memory, or leave it out; the others are built once"
)


class Killed(HplmError):
    """The process of a job ended before the job did. Others go on."""

    def __init__(self) -> None:
        super().__init__(
            "a worker process was killed, perhaps because memory ran out. Give it more memory and run the same command: it "
            "continues from what is done"
        )


class Workers(Executor):
    """Does so many jobs at a time, each in a process. One whose process is killed raises Killed, and another process starts."""

    def __init__(self, count: int, start: Callable[[], Executor]) -> None:
        """`start` returns what does one job at a time in a process."""
        self._start, self._free = start, SimpleQueue[Executor]()
        for _ in range(count):
            self._free.put(start())
        # A process inherits the mask: Ctrl-C would end it with a traceback before it is killed.
        self._waiting = ThreadPoolExecutor(count, "worker", signal.pthread_sigmask, (signal.SIG_BLOCK, [signal.SIGINT]))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._waiting.submit(self._do, partial(fn, *args, **kwargs))

    def _do(self, job: Callable[[], T]) -> T:
        process = self._free.get()
        try:
            return process.submit(job).result()
        except BrokenProcessPool:
            process = self._start()
            raise Killed from None
        finally:
            self._free.put(process)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._waiting.shutdown(wait, cancel_futures=cancel_futures)
        while wait and not self._free.empty():
            self._free.get().shutdown()


@contextmanager
def worker_processes(count: int, threads: int | None = None) -> Generator[Workers, None, None]:
    """A pool of processes. An error or Ctrl-C ends all of them at once, since their work continues from savepoints.

    `threads`: of torch in each; None: as it chooses.
    """
    context = get_context("spawn")
    resource_tracker.ensure_running()  # which would change the mask of the thread that starts the first process
    told, line = context.Pipe(duplex=False)
    pool = Workers(count, lambda: ProcessPoolExecutor(1, context, initializer=_begin, initargs=(told, threads)))
    try:
        yield pool
    except BaseException:
        line.close()  # ends those that are just being started
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        pool.shutdown()
        raise
    else:
        pool.shutdown()  # once all tasks are done
    finally:
        line.close()
        told.close()


def _begin(told: Connection, threads: int | None) -> None:
    """Ends this process when its owner is killed or closes the pipe; otherwise the pool would wait for work for ever."""
    if threads is not None:
        import torch  # it takes seconds, and not all work needs it

        torch.set_num_threads(threads)
    owner = parent_process()
    assert owner is not None  # this is a worker

    def watch() -> None:
        wait([owner.sentinel, told])
        os._exit(1)

    Thread(target=watch, name="owner", daemon=True).start()


def outcomes(
    pool: Executor, work: Callable[[str, G], T], things: Sequence[tuple[str, G]]
) -> Iterator[tuple[tuple[str, G], T | str]]:
    """Yields each thing with what `work` returns of it, or with the reason why it failed, as they end: the others go on.

    One that lacked memory is tried again at the end, alone. Only what concerns all of them is raised.
    """
    running, again = {pool.submit(work, *thing): thing for thing in things}, list[tuple[str, G]]()
    for done in as_completed(running):
        if _lacked_memory(done.exception()):
            again.append(running[done])
        else:
            yield running[done], _outcome(done)
    for thing in again:
        done = pool.submit(work, *thing)
        yield thing, KILLED if _lacked_memory(done.exception()) else _outcome(done)


def _lacked_memory(error: BaseException | None) -> bool:
    words = ("allocate memory", "out of memory")  # of torch
    return isinstance(error, Killed | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _outcome(done: Future[T]) -> T | str:
    error = done.exception()
    if error is None:
        return done.result()
    if not isinstance(error, Exception) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        raise error
    if isinstance(error, HplmError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:  # a file that nobody may read
        return f"{error.filename}: {error.strerror}"
    say("".join(traceback.format_exception(error)))
    return f"it failed unexpectedly ({kind_of(error)}); the traceback above says where. The others go on"
