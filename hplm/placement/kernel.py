"""Calls a compiled kernel: the screen's loops over the texts of a trace, which come as columns of numbers.

Where it is missing, `hplm/placement/stepping.py` does the same, some hundred times as slowly.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

import numpy as np

from hplm.arrays import Array
from hplm.compiled import kernel, number_fields, pointer_fields

SIZES = ("texts", "groups", "lines", "backbones", "stages", "most")
TERMS = 4  # of `Terms`
NEVER = 1e300


@dataclass(frozen=True, eq=False)
class ScreenCase:
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


COLUMNS = tuple(field.name for field in fields(ScreenCase))
WORKING = ("wakes", "head", "tail", "next")


class _Case(ctypes.Structure):
    _fields_ = *number_fields(*SIZES), *pointer_fields(*COLUMNS, *WORKING)


def run(case: ScreenCase, most: int) -> bool:
    """Does what `Steps.run` does. Returns False if the kernel was not compiled."""
    if (compiled := kernel()) is None:
        return False
    texts, groups, lines = len(case.end), len(case.depth), len(case.backbone)
    sizes = texts, groups, lines, len(case.around), case.clock.shape[1], most
    working = np.full(groups, NEVER), *np.full((2, lines), -1, np.int32), np.empty(texts, np.int32)
    columns = [*(getattr(case, name) for name in COLUMNS), *working]
    compiled.library.hplm_screen(ctypes.byref(_Case(*sizes, *(own.ctypes.data for own in columns))))
    return True
