"""Times a table that is not in memory: our read-ahead, beside parallel reads of the same rows."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from bench.turns import Timing, alternate_timed
from hplm.errors import Broken, InvalidInput
from hplm.plot.forest import Forest
from hplm.plot.gathering import Gatherer
from hplm.plot.table import Table

ATTEMPTS, PAUSE = 20, 0.01  # seconds
THREADS = (1, 2, 4, 8, 16, 32)
_libc = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Drops a file from the page cache. Raises if some pages stay."""
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


def can_drop(folder: Path) -> bool:
    """Whether files in this folder can be dropped from memory. In a tmpfs they cannot, because it is in memory."""
    probe = folder / "probe"
    probe.write_bytes(bytes(1 << 20))
    try:
        drop(probe)
    except InvalidInput:
        return False
    finally:
        probe.unlink()
    return True


class Cold:
    """Reads a table that is not in memory. Each repetition drops the file and opens it anew, so that rows are checked again."""

    def __init__(
        self, table: Path, open_forest: Callable[[], Forest], addresses: list[np.ndarray], lengths: np.ndarray
    ) -> None:
        self._open_forest, self._path, self._meta = open_forest, table / "values", Table(table).meta
        self._addresses, self._lengths = addresses, lengths

    def measure(self, seconds: float) -> tuple[dict[str, Timing], int]:
        """Returns the timings, and the number of threads that read fastest."""
        with ThreadPoolExecutor(max(THREADS)) as pool:
            list(pool.map(time.sleep, [0.01] * max(THREADS)))  # starts its threads
            tried = {count: (lambda text, count=count: self._preads(text, pool, count)) for count in THREADS}
            timings = alternate_timed({str(count): variant for count, variant in tried.items()}, seconds / len(THREADS))
            best = min(THREADS, key=lambda count: timings[str(count)].median)
            return alternate_timed({"cold": self._read_ahead, "pread": tried[best]}, seconds), best

    def _read_ahead(self, text: int) -> float:
        addresses = self._of(text)
        drop(self._path)
        forest = self._open_forest()
        _ = forest.tables_of(addresses)[0][0].rows  # opened before the clock starts
        gatherer = Gatherer(torch.device("cpu"), torch.bfloat16)
        start = time.perf_counter()
        broken = gatherer.broken(forest, addresses)
        gatherer.sums(forest, addresses, self._lengths)
        taken = time.perf_counter() - start
        if len(broken):
            raise Broken(f"row {broken[0]} of {self._path} does not match its checksum")
        return taken

    def _preads(self, text: int, pool: ThreadPoolExecutor, threads: int) -> float:
        stride = self._meta.row_bytes
        starts = np.unique(self._of(text)) * stride
        parts = [part.tolist() for part in np.array_split(starts, min(threads, len(starts)))]
        drop(self._path)
        descriptor = os.open(self._path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # otherwise the kernel reads ahead

        def read(part: list[int]) -> None:
            for start in part:
                os.pread(descriptor, stride, start)

        start = time.perf_counter()
        list(pool.map(read, parts))
        taken = time.perf_counter() - start
        os.close(descriptor)
        return taken

    def _of(self, text: int) -> np.ndarray:
        return self._addresses[text % len(self._addresses)]


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
