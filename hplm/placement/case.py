"""A trace and a placement as columns of numbers, as the screen's loop takes them."""

from __future__ import annotations

from dataclasses import dataclass

from hplm.arrays import Array

TERMS = 4  # of `Terms`
NEVER = 1e300


@dataclass(frozen=True, eq=False)
class Case:
    """Nanoseconds as 64-bit floats, numbers as the kernel has them. `clock`, `end` and `busy` are results.

    A line is of the texts of one backbone that the same groups serve.
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
