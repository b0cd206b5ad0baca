"""Calls the compiled kernel, `kernel.c`: the choice of the default policy in one call.

Where it is missing, `Timely.by_arrays` does the same, several times as slowly. A test holds both together.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.compiled import library, opened
from hplm.scheduling.columns import Columns
from hplm.scheduling.waiting import Capacity

LIBRARY = library(__file__)
VERSION = 3  # of its functions, as in kernel.c


@dataclass(frozen=True)
class Rules:
    """The default policy's facts that are the same for all texts."""

    start_ns: int
    batch_ns: float
    limits: Array  # tokens of the plan's first batches, together; 64-bit floats
    late: float
    reserved: int  # tokens for the texts that have waited longest


class _Waiting(ctypes.Structure):
    _fields_ = (
        ("texts", c_void_p), ("demand", c_void_p), ("count", c_int64), ("slot_keys", c_int64), ("tenants", c_int64),
    )  # fmt: skip


class _Rules(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64), ("texts", c_int64), ("slots", c_int64),
        ("start_ns", c_int64), ("horizon", c_int64), ("reserved", c_int64),
        ("per_batch", c_double), ("late", c_double), ("limits", c_void_p),
    )  # fmt: skip


class Kernel:
    def __init__(self, path: Path) -> None:
        compiled = ctypes.PyDLL(str(path))  # keeps the interpreter's lock: to get that back can take longer than a call
        self._choose = compiled.hplm_choose
        self._choose.argtypes = (c_void_p,) * 4
        self._choose.restype = c_int64

    def choose(self, columns: Columns, capacity: Capacity, rules: Rules) -> tuple[Array, int] | None:
        """Returns the texts of the next batch, and the tokens that it takes from the reserve. None: a text has a priority."""
        waiting = _Waiting(_at(columns.rows), _at(columns.demand), len(columns), columns.slot_keys, columns.tenants)
        given = _Rules(
            capacity.tokens, capacity.texts, capacity.tenants,
            rules.start_ns, len(rules.limits), rules.reserved, 1 / rules.batch_ns, rules.late, _at(rules.limits),
        )  # fmt: skip
        chosen, reserve = np.empty(len(columns), np.int64), c_int64()
        taken = self._choose(ctypes.byref(waiting), ctypes.byref(given), _at(chosen), ctypes.byref(reserve))
        return (chosen[:taken].copy(), reserve.value) if taken >= 0 else None


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "numpy chooses batches instead, which takes several times as long")


def _at(numbers: Array) -> int:
    return numbers.ctypes.data
