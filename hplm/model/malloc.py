"""Settings of malloc for large tensors."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, in the whole process and in threads that start later.

    An engine allocates the same large tensors for every batch. By default glibc returns large blocks to the system at once, and
    gets them again with one page fault for every 4 KB.
    """
    _tune(M_TRIM_THRESHOLD, NEVER)
    _tune(M_MMAP_MAX, 0)
    share_one_arena()


def share_one_arena() -> None:
    """Makes threads that start later allocate where the main thread does.

    Other arenas have 64 MB at most and are returned as a whole.
    """
    _tune(M_ARENA_MAX, 1)


def _tune(what: int, value: int) -> None:
    ctypes.CDLL(None).mallopt(what, value)
