"""The result of a simulation: which requests were answered by their deadlines, and how busy the groups were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.placement.workload import Trace

REFUSED = -1.0  # the end of a text without an answer in time


@dataclass(frozen=True, eq=False)
class Attained:
    trace: Trace
    end_ns: Array  # when each text was answered, or REFUSED
    busy_ns: Array  # of each group: the mean of its stages

    @property
    def served(self) -> Array:
        return self.end_ns != REFUSED

    @property
    def share(self) -> float:
        """The texts that were answered in time: AlpaServe's SLO attainment."""
        return float(np.count_nonzero(self.served) / len(self.trace))

    @property
    def unserved(self) -> Array:
        """The texts of each unit that were not answered in time."""
        return np.bincount(self.trace.unit[~self.served], minlength=len(self.trace.names))

    @property
    def by_unit(self) -> dict[str, float]:
        """The share of each unit that has requests."""
        shares = 1 - self.unserved / np.maximum(1, self.trace.counts)
        return {
            name: float(share) for name, share, count in zip(self.trace.names, shares, self.trace.counts, strict=True) if count
        }

    @property
    def latency_ns(self) -> Array:
        """Of the texts that were answered in time."""
        return (self.end_ns - self.trace.arrival_ns)[self.served]

    def mean_ms(self) -> float | None:
        return float(self.latency_ns.mean()) / 1e6 if self.served.any() else None

    def p99_ms(self) -> float | None:
        return float(np.percentile(self.latency_ns, 99)) / 1e6 if self.served.any() else None
