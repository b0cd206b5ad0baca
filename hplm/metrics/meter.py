"""Adds up the counts of several threads until the publisher takes them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from hplm.metrics.names import COUNTER, GAUGE, Histogram, Metric

Series = tuple[Metric, tuple[str, ...]]  # a metric and the values of its labels, in their order


class Meter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[Series, float] = defaultdict(float)
        self._levels: dict[Series, float] = {}

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        series = _series(metric, COUNTER, labels)
        with self._lock:
            self._counts[series] += amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        series = _series(metric, GAUGE, labels)
        with self._lock:
            self._levels[series] = value

    def observe(self, histogram: Histogram, values: Iterable[float]) -> None:
        """Counts each value in all buckets whose bound is not below it, as Prometheus requires."""
        observed = np.fromiter(values, dtype=float)
        if not len(observed):
            return
        bucket, total, number = histogram.parts
        below = np.searchsorted(np.sort(observed), histogram.bounds, side="right")
        with self._lock:
            for bound, count in zip(histogram.bounds, below.tolist(), strict=True):
                self._counts[bucket, (f"{bound:g}",)] += count
            self._counts[bucket, ("+Inf",)] += len(observed)
            sums = self._levels if total.kind == GAUGE else self._counts
            sums[total, ()] = sums.get((total, ()), 0.0) + float(observed.sum())
            self._counts[number, ()] += len(observed)

    def take(self) -> tuple[dict[Series, float], dict[Series, float]]:
        """Returns the counts since the last call, and the current levels."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
            return counts, dict(self._levels)

    def set_all(self, levels: Mapping[Series, float]) -> None:
        with self._lock:
            self._levels.update(levels)

    def add_all(self, counts: Mapping[Series, float]) -> None:
        """Adds counts that were taken, from this meter or from another process's."""
        with self._lock:
            for series, count in counts.items():
                self._counts[series] += count


def _series(metric: Metric, kind: str, labels: tuple[str, ...]) -> Series:
    assert metric.kind == kind and len(labels) == len(metric.labels), metric
    return metric, labels
