"""Calls the compiled kernel, `kernel.c`: the choice of the default policy, and the removal of a batch, in one call each.

Where it is missing, `Timely.by_arrays` and `Columns.remove` do the same, several times as slowly. Tests hold both together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hplm.arrays import Array
from hplm.compiled import library, opened
from hplm.scheduling.waiting import Capacity

LIBRARY = library(__file__)
VERSION = 2  # of its functions, as in kernel.c
# The columns of `Columns` in the order of kernel.c. Narrow columns are faster: they are read and moved for every batch.
WIDTHS = {
    "tokens": np.int32,
    "arrival": np.int64,
    "deadline": np.int64,
    "priority": np.int32,
    "slot_key": np.int32,
    "tenant": np.int32,
    "request": np.int64,
    "position": np.int32,
}


@dataclass(frozen=True)
class Rules:
    """The default policy's facts that are the same for all texts."""

    start_ns: int
    batch_ns: float
    limits: Array  # tokens of the plan's first batches, together; 64-bit floats
    late: float
    reserved: int  # tokens for the texts that have waited longest


class Table(ctypes.Structure):
    """Where the columns are in memory. It is made once, because to ask numpy for addresses takes longer than a choice."""

    _fields_ = (
        *((name, c_void_p) for name in (*WIDTHS, "demand")),
        ("count", c_int64), ("slot_keys", c_int64), ("tenants", c_int64),
    )  # fmt: skip

    @classmethod
    def of(cls, columns: Iterable[Array], demand: Array) -> Table:
        return cls(*map(_at, columns), _at(demand))


class _Rules(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64), ("texts", c_int64), ("slots", c_int64),
        ("start_ns", c_int64), ("horizon", c_int64), ("reserved", c_int64),
        ("per_batch", c_double), ("late", c_double), ("limits", c_void_p),
    )  # fmt: skip


class Kernel:
    def __init__(self, path: Path) -> None:
        compiled = ctypes.PyDLL(str(path))  # keeps the interpreter's lock: to get that back can take longer than a call
        self._choose, self._remove = compiled.hplm_choose, compiled.hplm_remove
        self._choose.argtypes = (c_void_p,) * 4
        self._choose.restype = c_int64
        self._remove.argtypes = (c_void_p, c_void_p, c_int64)
        self._remove.restype = None

    def choose(self, table: Table, capacity: Capacity, rules: Rules) -> tuple[Array, int] | None:
        """Returns the texts of the next batch, and the tokens that it takes from the reserve. None: a text has a priority."""
        given = _Rules(
            capacity.tokens, capacity.texts, capacity.tenants,
            rules.start_ns, len(rules.limits), rules.reserved, 1 / rules.batch_ns, rules.late, _at(rules.limits),
        )  # fmt: skip
        chosen, reserve = np.empty(table.count, np.int64), c_int64()
        taken = self._choose(ctypes.byref(table), ctypes.byref(given), _at(chosen), ctypes.byref(reserve))
        return (chosen[:taken].copy(), reserve.value) if taken >= 0 else None

    def remove(self, table: Table, gaps: Array) -> None:
        """Removes these texts from all columns, in place. The others keep their order."""
        gaps = np.sort(gaps)
        self._remove(ctypes.byref(table), _at(gaps), len(gaps))


@cache
def kernel() -> Kernel | None:
    """Returns the kernel, or None if it was not compiled. Says so once."""
    return opened(LIBRARY, VERSION, Kernel, "numpy chooses batches instead, which takes several times as long")


def _at(numbers: Array) -> int:
    return numbers.ctypes.data
