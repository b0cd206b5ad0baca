"""Shared memory for answers to the server process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hplm.errors import OutOfCapacity

SHARED = "/dev/shm"
LARGE = 1 << 20  # bytes of an answer; smaller ones fit into the shared memory that a process already has
SPARE = 1 << 24


def free_bytes() -> int:
    """Returns the bytes of /dev/shm that are free."""
    system = os.statvfs(SHARED)
    return system.f_bavail * system.f_frsize


class SharedMemory:
    """Checks that /dev/shm has space for large answers. A process's part of it grows with the largest answer, and stays."""

    def __init__(self, free_bytes: Callable[[], int] = free_bytes) -> None:
        self._free_bytes = free_bytes
        self._one_at_a_time = threading.Lock()  # space that another answer is about to take must not count as free
        self._largest = 0

    @contextmanager
    def taken(self, size: int) -> Generator[None]:
        """Wraps the sending of a large answer of `size` bytes. Raises OutOfCapacity if /dev/shm has no space for it.

        Without this check the answer would be lost, and the error message too.
        """
        with self._one_at_a_time:
            free = self._free_bytes()
            if size > self._largest and size - self._largest + SPARE > free:
                raise OutOfCapacity(
                    f"the answer takes {size / 1e6:,.0f} MB, but {SHARED} has {free / 1e6:,.0f} MB left: send fewer texts, "
                    "or give the server more shared memory (Docker: --shm-size)"
                )
            yield
            self._largest = max(self._largest, size)
