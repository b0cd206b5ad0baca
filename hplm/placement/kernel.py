"""Calls the compiled kernel, `kernel.c`: the screen's loop over the texts of a trace.

Where it is missing, `hplm/placement/stepping.py` does the same, some hundred times as slowly. Tests hold both together.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np

from hplm.compiled import library, opened
from hplm.placement.case import NEVER, Case

LIBRARY = library(__file__)
VERSION = 2  # of its functions, as in kernel.c
SIZES = ("texts", "groups", "lines", "backbones", "stages", "most")
COLUMNS = tuple(field.name for field in fields(Case))
WORKING = ("wakes", "head", "tail", "next")


class _Case(ctypes.Structure):
    _fields_ = (*((name, c_int64) for name in SIZES), *((name, c_void_p) for name in COLUMNS + WORKING))


class Kernel:
    def __init__(self, path: Path) -> None:
        self._screen = ctypes.CDLL(str(path)).hplm_screen
        self._screen.argtypes, self._screen.restype = (c_void_p,), None

    def run(self, case: Case, most: int) -> None:
        """Does what `Steps.run` does."""
        texts, groups, lines = len(case.end), len(case.depth), len(case.backbone)
        sizes = texts, groups, lines, len(case.around), case.clock.shape[1], most
        working = np.full(groups, NEVER), *np.full((2, lines), -1, np.int32), np.empty(texts, np.int32)
        columns = [*(getattr(case, name) for name in COLUMNS), *working]
        self._screen(ctypes.byref(_Case(*sizes, *(own.ctypes.data for own in columns))))


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "Python screens placements instead, which takes a hundred times as long")
