"""Processes that work side by side."""

from __future__ import annotations

import os

from hplm.memory import machine_memory


def processes_that_fit(wanted: int, bytes_each: int, waiting: int = 0) -> int:
    """Returns how many processes fit on this machine at a time, at most `wanted`.

    `waiting`: how many of them wait for something most of the time, and need no core of their own.
    """
    return max(1, min(wanted, len(os.sched_getaffinity(0)) + waiting, machine_memory()[1] // bytes_each))
