"""Drops files from the page cache, so that the next read of them comes from the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np

from hplm.errors import InvalidInput

ATTEMPTS, PAUSE = 20, 0.01  # seconds
_libc = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Raises if some pages stay. In a tmpfs all do, because it is in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        resident = 0
        for _ in range(ATTEMPTS):  # a page that the system has just read is still in use for a moment
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            resident = _resident_pages(descriptor)
            if not resident:
                return
            time.sleep(PAUSE)
    finally:
        os.close(descriptor)
    raise InvalidInput(f"{resident} pages of {path} cannot be dropped from memory: choose a --folder on a disk")


def _resident_pages(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        refused = _libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        del view
    if refused:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum())
