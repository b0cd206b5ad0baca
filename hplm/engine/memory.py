"""Memory that is freed and asked for again, and memory that is shared with the server process."""

from __future__ import annotations

import ctypes
import os

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


def check_shared(size: int) -> None:
    """Before an answer is sent: one that finds no room on its way is lost, and so is the error that would say so."""
    if size < LARGE:
        return
    room = os.statvfs(SHARED)
    free = room.f_bavail * room.f_frsize
    if size + SPARE > free:
        raise Broken(
            f"the answer takes {size / 1e6:,.0f} MB and {SHARED} has {free / 1e6:,.0f} left: send fewer texts, or give the "
            "server more (Docker: --shm-size)"
        )
