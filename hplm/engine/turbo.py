"""TurboBatching: cuts texts in order of length into padded groups of least measured cost (TurboTransformers, after TCB 6.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array

COUNTS = (1, 4, 16, 64)  # measured numbers of texts in a group
WIDTHS = (4, 16, 48, 128)  # measured tokens of a text


@dataclass(frozen=True)
class GroupCost:
    """Seconds of a padded group, measured on a grid, with linear interpolation and extrapolation.

    If only padded tokens counted, one group for each length would be best. The fixed cost of a call makes larger groups better.
    """

    counts: Array
    widths: Array
    seconds: Array  # counts x widths

    @classmethod
    def measured(cls, measure: Callable[[int, int], float]) -> GroupCost:
        seconds = np.array([[measure(count, width) for width in WIDTHS] for count in COUNTS])
        return cls(np.array(COUNTS), np.array(WIDTHS), seconds)

    def of(self, count: Array, width: Array) -> Array:
        row, down = _place(self.counts, count)
        column, right = _place(self.widths, width)
        upper = self.seconds[row, column] * (1 - right) + self.seconds[row, column + 1] * right
        lower = self.seconds[row + 1, column] * (1 - right) + self.seconds[row + 1, column + 1] * right
        return upper * (1 - down) + lower * down


def _place(points: Array, x: Array) -> tuple[Array, Array]:
    """Returns the point before each x, and the fraction of the way from there to the next point."""
    before = np.clip(np.searchsorted(points, x, "right") - 1, 0, len(points) - 2)
    return before, (x - points[before]) / (points[before + 1] - points[before])


def cheapest_cuts(lengths: Array, cost: GroupCost) -> Array:
    """Returns where to cut texts, given longest first, so that the groups together cost least."""
    count = len(lengths)
    least = np.zeros(count + 1)  # lowest cost of the texts up to each
    begin = np.zeros(count + 1, dtype=np.int64)  # where the last group of these begins
    for end in range(1, count + 1):
        starts = np.arange(end)
        totals = least[:end] + cost.of(end - starts, lengths[:end])
        begin[end] = totals.argmin()
        least[end] = totals[begin[end]]
    cuts: list[int] = []
    end = count
    while begin[end] > 0:
        end = int(begin[end])
        cuts.append(end)
    return np.array(cuts[::-1], dtype=np.int64)
