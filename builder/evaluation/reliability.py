"""The reliability of confidences: calibration errors, and the bins that a picture of them shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array

BINS = 15  # of equal width, as in Guo et al. 2017


@dataclass(frozen=True)
class Bin:
    """The answers whose confidence lies in one part of 0 to 1."""

    count: int
    confidence: float  # their mean
    right: float  # the share of right ones


def bins_of(confidences: Array, right: Array, count: int = BINS) -> list[Bin]:
    """Returns the bins that are not empty, `count` of equal width in all."""
    places = np.minimum((confidences * count).astype(np.int64), count - 1)
    members = [places == place for place in np.unique(places)]
    return [Bin(int(own.sum()), float(confidences[own].mean()), float(right[own].mean())) for own in members]


def calibration_error(bins: list[Bin]) -> float:
    """Returns the expected calibration error: the mean distance between confidence and share of right answers."""
    return sum(one.count * abs(one.confidence - one.right) for one in bins) / sum(one.count for one in bins)
