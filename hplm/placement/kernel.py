"""Calls a compiled kernel: the screen's loop over the texts of a trace, which come as columns of numbers.

Where it is missing, `hplm/placement/stepping.py` does the same, some hundred times as slowly. That one also has batches.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

from hplm.arrays import Array
from hplm.compiled import kernel, number_fields, pointer_fields

TERMS = 4  # of `Terms`


@dataclass(frozen=True, eq=False)
class Case:
    """A trace and a placement, with numbers as the kernel has them. Times are nanoseconds.

    `clock`, `end` and `busy` are results.
    """

    arrival: Array  # by text, as the three below
    timeout: Array
    unit: Array
    tokens: Array
    backbone: Array  # of each unit
    serves: Array  # by unit and group: 1 or 0
    depth: Array  # stages of each group
    terms: Array  # by group, backbone, stage and term
    around: Array  # by backbone and term
    clock: Array  # by group and stage: when each stage is free
    end: Array  # by text: when it is answered, or REFUSED
    busy: Array  # by group


COLUMNS = tuple(field.name for field in fields(Case))


class _Case(ctypes.Structure):
    _fields_ = *number_fields("texts", "groups", "backbones", "stages"), *pointer_fields(*COLUMNS)


def run(case: Case) -> bool:
    """Does what `Steps(case).run` does. Returns False if the kernel was not compiled."""
    if (compiled := kernel()) is None:
        return False
    sizes = len(case.end), len(case.depth), len(case.around), case.clock.shape[1]
    compiled.library.hplm_screen(ctypes.byref(_Case(*sizes, *(getattr(case, name).ctypes.data for name in COLUMNS))))
    return True
