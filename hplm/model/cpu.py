"""How a process computes on a CPU: OpenMP's threads, among which torch divides a product, and malloc for large tensors.

Each thread that computes gets threads of its own for that, until it ends. GNU's OpenMP lets them wait actively for the next
product only while all of them together are no more than the processors. Otherwise they sleep and are woken up for each product,
and a small batch takes half as long again. So one thread of a process should compute, and beside it only threads that
divide no product.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from threading import Barrier, Event
from typing import Generic, TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
NEVER = 2**31 - 1
ONE_ARENA = M_ARENA_MAX, 1  # that all threads share which start later: others have 64 MB, and are returned as a whole
mallopt = ctypes.CDLL(None).mallopt


def apart(make: Callable[[], T]) -> T:
    """Calls `make` in a thread of its own, which then ends, and its OpenMP threads with it."""
    mallopt(*ONE_ARENA)  # before there is a second thread
    with ThreadPoolExecutor(1, "make") as thread:
        return thread.submit(make).result()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, in the whole process and in threads that start later.

    An engine allocates the same large tensors for every batch. By default glibc returns large blocks to the system at once, and
    gets them again with one page fault for every 4 KB.
    """
    for what, value in ((M_TRIM_THRESHOLD, NEVER), (M_MMAP_MAX, 0), ONE_ARENA):
        mallopt(what, value)


def compute_with(threads: int) -> None:
    """Divides what the calling thread computes among so many threads."""
    torch.get_num_threads()  # with its first use a thread takes over the number that another one has set: here, and not later
    torch.set_num_threads(threads)


class SideBySide:
    """Threads that divide no product. Each computes something else, and none waits for another before the end of all."""

    def __init__(self, threads: int) -> None:
        """All threads start now, so that none is missing later."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "side by side", partial(compute_with, 1))
        self._running: list[Future[None]] = []
        all_started = Barrier(threads)
        wait([self._pool.submit(all_started.wait) for _ in range(threads)])

    def start(self, compute: Callable[[S], Iterator[T]], given: Sequence[S]) -> Computing[T]:
        """Lets threads compute each, as they get free of what was started before. Returns when the first one has begun."""
        begun, found = Event(), SimpleQueue[T | int]()

        @torch.inference_mode()
        def run(one: S) -> None:
            begun.set()
            start = time.monotonic_ns()
            try:
                for part in compute(one):
                    found.put(part)
            finally:
                found.put(time.monotonic_ns() - start)

        running = [self._pool.submit(run, one) for one in given]
        self._running = [*(one for one in self._running if not one.done()), *running]
        begun.wait()
        return Computing(running, found, self._threads)

    def wait(self) -> None:
        """Returns when the threads compute nothing."""
        wait(self._running)
        self._running.clear()  # an error that holds its own future would keep memory until Python looks for cycles


class Computing(Generic[T]):
    """A batch that threads compute side by side. Yields their results."""

    def __init__(self, running: list[Future[None]], found: SimpleQueue[T | int], threads: int) -> None:
        self._running, self._found, self._threads = running, found, threads
        self.took_ns = 0  # once it has ended: how long it takes if all threads always compute
        self.uneven_ns = 0  # how long before its end a thread had nothing more of it to do

    def __iter__(self) -> Iterator[T]:
        """Yields what is computed of each, as it comes. At its end, and after an error, nothing of it computes any more."""
        running, left, ended_ns = self._running, len(self._running), list[int]()
        try:
            while left:
                part = self._found.get()
                if isinstance(part, int):
                    left -= 1
                    ended_ns.append(time.monotonic_ns())
                    self.took_ns += part // self._threads
                else:
                    yield part
        finally:
            wait(running)
        self.uneven_ns = ended_ns[-1] - ended_ns[0]
        errors = [error for one in running if (error := one.exception()) is not None]
        running.clear()
        if errors:
            raise errors.pop(0)
