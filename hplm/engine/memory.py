"""What the C library does with freed memory: an engine asks for the same large tensors again with every batch.

glibc gives large pieces back to the system at once and takes them anew, empty, one page fault every 4 KB.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """For the whole process, and for threads that start after it. Another C library than glibc is left as it is."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_TRIM_THRESHOLD, NEVER)
        tune(M_MMAP_MAX, 0)
        tune(M_ARENA_MAX, 1)  # other arenas hold 64 MB at most and are given back as a whole
