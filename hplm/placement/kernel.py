"""Calls the compiled kernel, `kernel.c`: the screen's loops over the texts of a trace, which come as columns of numbers.

Where it is missing, `hplm/placement/stepping.py` does the same, some hundred times as slowly. Tests hold both together.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.compiled import library, opened

LIBRARY = library(__file__)
VERSION = 3  # of its functions, as in kernel.c
SIZES = ("texts", "groups", "lines", "backbones", "stages", "most")
TERMS = 4  # of `Terms`
NEVER = 1e300


@dataclass(frozen=True, eq=False)
class Case:
    """A trace and a placement, with numbers as the kernel has them. `clock`, `end` and `busy` are results.

    A line is of the texts of one backbone that the same groups serve. Times are nanoseconds.
    """

    arrival: Array  # by text, as the three below
    timeout: Array
    unit: Array
    tokens: Array
    line: Array  # of each unit; -1: no group serves it
    backbone: Array  # of each line
    serves: Array  # by line and group: 1 or 0
    depth: Array  # stages of each group
    terms: Array  # by group, backbone, stage and term
    around: Array  # by backbone and term
    clock: Array  # by group and stage: when each stage is free
    end: Array  # by text: when it is answered, or REFUSED
    busy: Array  # by group


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
