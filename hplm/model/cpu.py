"""How a process computes on a CPU: OpenMP's threads, among which torch divides a product, and malloc for large tensors.

Each thread that computes gets threads of its own for that, until it ends. GNU's OpenMP lets them wait actively for the next
product only while all of them together are no more than the processors. Otherwise they sleep and are woken up for each product,
and a small batch takes half as long again. So one thread of a process should compute, and beside it only threads that
divide no product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from threading import Barrier
from typing import TypeVar

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
        self._pool = ThreadPoolExecutor(threads, "side by side", partial(compute_with, 1))
        all_started = Barrier(threads)
        wait([self._pool.submit(all_started.wait) for _ in range(threads)])

    def each(self, compute: Callable[[S], Iterator[T]], given: Sequence[S]) -> Iterator[T]:
        """Yields what `compute` yields of each, as it comes. At its end, and after an error, nothing computes any more."""
        found: SimpleQueue[T | None] = SimpleQueue()

        @torch.inference_mode()
        def run(one: S) -> None:
            try:
                for part in compute(one):
                    found.put(part)
            finally:
                found.put(None)

        running = [self._pool.submit(run, one) for one in given]
        try:
            for _ in running:
                yield from iter(found.get, None)
        finally:
            wait(running)
        errors = [error for one in running if (error := one.exception()) is not None]
        running.clear()  # an error that holds its own future would keep memory until Python looks for cycles
        if errors:
            raise errors.pop(0)
