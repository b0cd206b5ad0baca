"""Adds up the counts of several threads until the publisher takes them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from math import inf

from hplm.metrics.names import COUNTER, GAUGE, Histogram, Metric

Series = tuple[Metric, tuple[str, ...]]  # a metric and the values of its labels, in their order


class Meter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[Series, float] = defaultdict(float)
        self._levels: dict[Series, float] = {}
        self._given: Set[Series] = frozenset()  # levels that `set_all` has set
        self._observed: dict[str, tuple[Histogram, list[float]]] = {}  # by the histogram's name, since the last `take`

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        series = _series(metric, COUNTER, labels)
        with self._lock:
            self._counts[series] += amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        series = _series(metric, GAUGE, labels)
        with self._lock:
            self._levels[series] = value

    def observe(self, histogram: Histogram, values: Iterable[float]) -> None:
        """Counts values."""
        with self._lock:
            self._observed.setdefault(histogram.name, (histogram, []))[1].extend(values)

    def take(self) -> tuple[dict[Series, float], dict[Series, float]]:
        """Returns the counts since the last call, and the current levels."""
        with self._lock:
            for histogram, values in self._observed.values():
                self._publish(histogram, sorted(values))
            self._observed.clear()
            counts, self._counts = self._counts, defaultdict(float)
            return counts, dict(self._levels)

    def _publish(self, histogram: Histogram, values: list[float]) -> None:
        """Adds sorted values to their series. Each counts in all buckets whose bound is not below it."""
        bucket, total, number = histogram.parts
        for bound in (*histogram.bounds, inf):
            self._counts[bucket, ("+Inf" if bound == inf else f"{bound:g}",)] += bisect_right(values, bound)
        self._counts[total, ()] += sum(values)
        self._counts[number, ()] += len(values)

    def set_all(self, levels: Mapping[Series, float]) -> None:
        """Sets levels that were measured together, maybe in another process, and ends those that are no longer among them."""
        with self._lock:
            for ended in self._given - levels.keys():
                self._levels.pop(ended, None)
            self._levels.update(levels)
            self._given = levels.keys()

    def add_all(self, counts: Mapping[Series, float]) -> None:
        """Adds counts that were taken, from this meter or from another process's."""
        with self._lock:
            for series, count in counts.items():
                self._counts[series] += count


def _series(metric: Metric, kind: str, labels: tuple[str, ...]) -> Series:
    assert metric.kind == kind and len(labels) == len(metric.labels), metric
    return metric, labels
