"""Random requests for placements: a Gamma process for each unit."""

from __future__ import annotations

import numpy as np

from hplm.arrays import Array
from hplm.placement.workload import Trace
from hplm.simulate.arrivals import SECOND


def power_law(count: int, exponent: float) -> Array:
    """Returns shares of a load that sum to 1, the largest first."""
    weight = np.arange(1, count + 1) ** -float(exponent)
    return weight / weight.sum()


def random_trace(rates: dict[str, float], seconds: float, cv: float = 1.0, tokens: int = 64, seed: int = 0) -> Trace:
    """Draws a Gamma process for each unit, with its rate in requests a second. `cv`: of the gaps; 1 is Poisson."""
    rng = np.random.default_rng(seed)
    streams = [_arrivals(rate, cv, seconds, rng) for rate in rates.values()]
    arrival = np.concatenate(streams)
    order = np.argsort(arrival, kind="stable")
    unit = np.repeat(np.arange(len(streams)), list(map(len, streams)))
    lengths, timeout = np.full(len(arrival), tokens), np.zeros(len(arrival), np.int64)
    return Trace(tuple(rates), arrival[order], unit[order], lengths, timeout, f"synthetic: Gamma, CV {cv:g}, seed {seed}")


def _arrivals(rate: float, cv: float, seconds: float, rng: np.random.Generator) -> Array:
    """Returns the nanoseconds of a Gamma process's arrivals.

    The first gap is the rest of a running one, which is likely a long one: else short windows would have too many arrivals.
    """
    if rate <= 0:
        return np.empty(0, np.int64)
    shape, expected = 1 / cv**2, rate * seconds
    scale = 1 / (shape * rate)
    at = np.array([rng.random() * rng.gamma(shape + 1, scale)])
    while at[-1] < seconds:
        more = rng.gamma(shape, scale, int(expected + 4 * cv * expected**0.5) + 8)
        at = np.concatenate([at, at[-1] + np.cumsum(more)])
    return (at[at < seconds] * SECOND).astype(np.int64)
