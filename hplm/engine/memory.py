"""Memory that is freed and asked for again, and memory that is shared with the server process."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hplm.errors import Broken

SHARED = "/dev/shm"
LARGE = 1 << 20  # bytes of an answer; smaller ones fit into what a process has of it already
SPARE = 1 << 24

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """For the whole process, and for threads that start after it. Another C library than glibc is left as it is.

    An engine asks for the same large tensors again with every batch, and glibc gives large pieces back to the system at once
    and takes them anew, empty, one page fault every 4 KB.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_TRIM_THRESHOLD, NEVER)
        tune(M_MMAP_MAX, 0)
        tune(M_ARENA_MAX, 1)  # other arenas hold 64 MB at most and are given back as a whole


class SharedMemory:
    """What large answers find of /dev/shm. A process's part of it grows with the largest one, and stays for the next."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()  # what another is about to take is not to be counted as free
        self._largest = 0

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """While an answer of so many bytes is sent: one that finds no room is lost, and so is the error that would say so."""
        if size < LARGE:
            yield
            return
        with self._one_at_a_time:
            system = os.statvfs(SHARED)
            free = system.f_bavail * system.f_frsize
            if size > self._largest and size - self._largest + SPARE > free:
                raise Broken(
                    f"the answer takes {size / 1e6:,.0f} MB and {SHARED} has {free / 1e6:,.0f} left: send fewer texts, or give "
                    "the server more (Docker: --shm-size)"
                )
            yield
            self._largest = max(self._largest, size)
