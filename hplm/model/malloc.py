"""Settings of malloc for large tensors."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, in the whole process and in threads that start later. Does nothing for other C libraries.

    An engine allocates the same large tensors for every batch. By default glibc returns large blocks to the system at once, and
    gets them again with one page fault for every 4 KB.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_TRIM_THRESHOLD, NEVER)
        tune(M_MMAP_MAX, 0)
        tune(M_ARENA_MAX, 1)  # other arenas have 64 MB at most and are returned as a whole
