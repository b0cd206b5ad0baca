"""Calls the compiled kernel, `kernel.c`: the screen's loops over the texts of a trace.

Where it is missing, `hplm/placement/stepping.py` does the same, some hundred times as slowly. Tests hold both together.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.compiled import library, opened
from hplm.placement.case import Case

LIBRARY = library(__file__)
VERSION = 1  # of its functions, as in kernel.c
NEVER = 1e300
COLUMNS = tuple(field.name for field in fields(Case))


class _Case(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("texts", "groups", "backbones", "stages")),
        *((name, c_void_p) for name in COLUMNS),
    )


class _Lines(ctypes.Structure):
    _fields_ = (("head", c_void_p), ("tail", c_void_p), ("next", c_void_p))


class Kernel:
    def __init__(self, path: Path) -> None:
        compiled = ctypes.CDLL(str(path))
        self._screen, self._batches = compiled.hplm_screen, compiled.hplm_screen_batches
        self._screen.argtypes = (c_void_p,)
        self._batches.argtypes = (c_void_p, c_void_p, c_void_p, c_int64)
        self._screen.restype = self._batches.restype = None

    def one_by_one(self, case: Case) -> None:
        self._screen(ctypes.byref(_given(case)))

    def in_batches(self, case: Case, most: int) -> None:
        head, tail = np.full((2, len(case.backbone)), -1, np.int32)
        following = np.full(len(case.end), -1, np.int32)
        wakes: Array = np.full(len(case.depth), NEVER)
        lines = _Lines(_at(head), _at(tail), _at(following))
        self._batches(ctypes.byref(_given(case)), ctypes.byref(lines), _at(wakes), most)


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "Python screens placements instead, which takes a hundred times as long")


def _given(case: Case) -> _Case:
    sizes = len(case.end), len(case.depth), len(case.around), case.clock.shape[1]
    return _Case(*sizes, *(_at(getattr(case, name)) for name in COLUMNS))


def _at(numbers: Array) -> int:
    return numbers.ctypes.data
