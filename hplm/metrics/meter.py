"""Adds up the counts of several threads until the publisher takes them, and those of requests by what their clients got."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import inf

import numpy as np

from hplm.arrays import Array
from hplm.metrics import names
from hplm.metrics.names import COUNTER, GAUGE, Histogram, Metric

Series = tuple[Metric, tuple[str, ...]]  # a metric and the values of its labels, in their order
BUSIEST = 20  # tenants with series of their own
SECONDS_BETWEEN_CHOICES = 30.0
REMEMBERED = 0.5  # weight of earlier counts after each choice
OTHERS = ""  # the series of all other tenants
Outcome = tuple[str, str, str]  # of a request: domain, tenant, outcome
_OF_TENANTS = {names.TENANT_REQUESTS, names.EXIT_AGREEMENT}


class Meter:
    def __init__(self) -> None:
        self.look: Callable[[], None] = lambda: None  # called before counts are taken, to set gauges
        self._lock = threading.Lock()
        self._counts: defaultdict[Series, float] = defaultdict(float)
        self._gauges: dict[Series, float] = {}
        self._given: Set[Series] = frozenset()  # gauges that `set_all` has set
        self._observed: dict[tuple[str, ...], tuple[Histogram, list[float]]] = {}  # by name and labels, since the last `take`

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        series = _series(metric, COUNTER, labels)
        with self._lock:
            self._counts[series] += amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        series = _series(metric, GAUGE, labels)
        with self._lock:
            self._gauges[series] = value

    def observe(self, histogram: Histogram, values: Iterable[float], *labels: str) -> None:
        """Counts values."""
        assert len(labels) == len(histogram.labels), histogram
        with self._lock:
            self._observed.setdefault((histogram.name, *labels), (histogram, []))[1].extend(values)

    def take(self) -> tuple[dict[Series, float], dict[Series, float]]:
        """Returns the counts since the last call, and the current gauges."""
        self.look()
        with self._lock:
            observed, self._observed = self._observed, {}
            counts, self._counts = self._counts, defaultdict(float)
            gauges = dict(self._gauges)
        for (_, *labels), (histogram, values) in observed.items():  # not behind the lock: requests would wait meanwhile
            _publish(counts, histogram, np.sort(values), *labels)
        return counts, gauges

    def keeps(self, series: Series) -> bool:
        """Whether a series is still published."""
        return True

    def set_all(self, gauges: Mapping[Series, float]) -> None:
        """Sets gauges that were measured together, maybe in another process, and ends those that are no longer among them."""
        with self._lock:
            for ended in self._given - gauges.keys():
                self._gauges.pop(ended, None)
            self._gauges.update(gauges)
            self._given = gauges.keys()

    def add_all(self, counts: Mapping[Series, float]) -> None:
        """Adds counts that were taken, from this meter or from another process's."""
        with self._lock:
            for series, count in counts.items():
                self._counts[series] += count


def _publish(counts: defaultdict[Series, float], histogram: Histogram, values: Array, *labels: str) -> None:
    """Adds sorted values to their series. Each counts in all buckets whose bound is not below it."""
    bucket, total, number = histogram.parts
    bounds = (*histogram.bounds, inf)
    for bound, below in zip(bounds, np.searchsorted(values, bounds, side="right").tolist(), strict=True):
        counts[bucket, (*labels, "+Inf" if bound == inf else f"{bound:g}")] += below
    counts[total, labels] += float(values.sum())
    counts[number, labels] += len(values)


def _series(metric: Metric, kind: str, labels: tuple[str, ...]) -> Series:
    assert metric.kind == kind and len(labels) == len(metric.labels), metric
    return metric, labels


def outcome_of(deadline_ns: int, now_ns: int) -> str:
    """Returns the outcome of a request that is answered now. Without a deadline, `deadline_ns` is 0."""
    if not deadline_ns:
        return "answered"
    return "on_time" if now_ns <= deadline_ns else "late"


class Outcomes(Meter):
    """Counts the requests of one backbone, also by their tenants.

    A tenant's series starts when it is chosen, and ends when it no longer is. Each request counts in one series.
    """

    def __init__(self, most: int = BUSIEST) -> None:
        super().__init__()
        self.look = self._settle
        self._most = most
        self._counted: Counter[Outcome] = Counter()
        self._took: defaultdict[str, list[float]] = defaultdict(list)  # seconds from arrival to answer, by outcome
        self._allowed: list[float] = []
        self._asked: Counter[str] = Counter()  # requests by tenant
        self._chosen: frozenset[str] = frozenset()  # the tenants with series of their own
        self._chosen_at = time.monotonic()

    def count(self, requests: Sequence[Outcome], took: Sequence[float], allowed: Sequence[float]) -> None:
        """Counts requests that were answered or refused.

        `took`: seconds from the arrival of each until then. `allowed`: of those with a deadline, seconds from arrival to it.
        """
        with self._lock:
            self._counted.update(requests)
            for (_, _, outcome), seconds in zip(requests, took, strict=True):
                self._took[outcome].append(seconds)
            self._allowed += allowed

    def _settle(self) -> None:
        """Gives requests their series: not each by itself, because that would take much of the time of an answer."""
        now = time.monotonic()
        if now - self._chosen_at > SECONDS_BETWEEN_CHOICES:  # before counts are given to a series that ends
            self.choose()
            self._chosen_at = now
        with self._lock:
            counted, self._counted = self._counted, Counter()
            took, self._took = self._took, defaultdict(list)
            allowed, self._allowed = self._allowed, []
        for (domain, tenant, outcome), requests in counted.items():
            self.add(names.REQUESTS, requests, domain, outcome)
            self.add(names.TENANT_REQUESTS, requests, self._series(tenant, requests), outcome)
        for outcome, seconds in took.items():
            self.observe(names.ANSWER_SECONDS, seconds, outcome)
        if allowed:
            self.observe(names.DEADLINE_SECONDS, allowed)

    def _series(self, tenant: str, requests: int) -> str:
        """Counts requests of a tenant. Returns the name of the series that they belong to."""
        with self._lock:
            self._asked[tenant] += requests
            if tenant not in self._chosen:
                if len(self._chosen) == self._most:
                    return OTHERS
                self._chosen |= {tenant}
            return tenant

    def choose(self) -> None:
        """Chooses the busiest tenants again, and forgets tenants with few requests."""
        with self._lock:
            self._chosen = frozenset(tenant for tenant, _ in self._asked.most_common(self._most))
            faded = {tenant: count * REMEMBERED for tenant, count in self._asked.items()}
            self._asked = Counter({tenant: count for tenant, count in faded.items() if count >= REMEMBERED})

    def keeps(self, series: Series) -> bool:
        metric, labels = series
        return metric not in _OF_TENANTS or labels[0] in (OTHERS, *self._chosen)
