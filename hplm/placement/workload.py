"""The requests that a placement has to serve: columns of arrivals, and how they are scaled, refitted and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.placement.left_out import NOTHING, LeftOut
from hplm.simulate.arrivals import SECOND, Lengths

LEAST_S, MOST_S = 0.001, 1e9  # seconds of a part of a trace
LEAST_GAPS = 2  # of a window: from fewer gaps no coefficient of variation is estimated, and the arrivals are Poisson


@dataclass(frozen=True, eq=False)
class Trace:
    """Texts in order of arrival. `source` says where they come from, and that synthetic ones are synthetic."""

    names: tuple[str, ...]  # of units
    arrival_ns: Array
    unit: Array  # index in `names`
    tokens: Array
    timeout_ns: Array  # from arrival to deadline; 0: none
    source: str = "synthetic"
    left_out: LeftOut = NOTHING

    def __post_init__(self) -> None:
        if not len(self.arrival_ns):
            raise InvalidInput(f"the trace has no requests ({self.source}): record it for longer, or scale its rate up")
        backwards = np.flatnonzero(np.diff(self.arrival_ns) < 0)
        if len(backwards):
            at = int(backwards[0]) + 1
            raise InvalidInput(
                f"the trace runs backwards ({self.source}): request {at + 1} arrives before request {at}. Sort it by arrival"
            )

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def seconds(self) -> float:
        return max(1, int(self.arrival_ns[-1]) - int(self.arrival_ns[0]) + 1) / SECOND

    @property
    def counts(self) -> Array:
        """The requests for each unit."""
        return np.bincount(self.unit, minlength=len(self.names))

    def only(self, chosen: Array) -> Trace:
        """Returns the requests with these indexes, or of this mask."""
        return replace(
            self,
            arrival_ns=self.arrival_ns[chosen],
            unit=self.unit[chosen],
            tokens=self.tokens[chosen],
            timeout_ns=self.timeout_ns[chosen],
        )

    def between(self, start_ns: int, end_ns: int) -> Trace:
        first, last = np.searchsorted(self.arrival_ns, (start_ns, end_ns))
        return self.only(np.arange(int(first), int(last)))

    def busiest(self, seconds: float) -> Trace:
        """Returns the part of so many seconds that has the most requests."""
        span = span_ns(seconds)
        held = np.searchsorted(self.arrival_ns, self.arrival_ns + span) - np.arange(len(self))
        start = int(self.arrival_ns[held.argmax()])
        return self.between(start, start + span)

    def windows(self, seconds: float) -> list[Trace]:
        """Returns the windows that have requests, in order."""
        number = (self.arrival_ns - self.arrival_ns[0]) // span_ns(seconds)
        starts: list[int] = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
        return [self.only(np.arange(*ends)) for ends in pairwise([*starts, len(self)])]

    def sampled(self, most: int, windows: int = 16) -> Trace:
        """Returns at most so many requests: evenly spread stretches of the trace, each as long as it was and as bursty."""
        if len(self) <= most:
            return self
        windows = min(windows, most)
        starts = np.linspace(0, len(self) - most // windows, windows).astype(np.int64)
        return self.only(np.unique(starts[:, None] + np.arange(most // windows)))

    def with_timeouts(self, timeout_ns: Array) -> Trace:
        return replace(self, timeout_ns=np.maximum(1, timeout_ns).astype(np.int64))

    def expect_known(self, last_s: float | None = None) -> Trace:
        """Refuses a trace that leaves too much out. Returns it with what it leaves out of its last seconds (None: of all)."""
        start = None if last_s is None else int(self.arrival_ns[-1]) + 1 - span_ns(last_s)
        left_out = self.left_out if start is None else self.left_out.since(start)
        known = len(self) if start is None else len(self) - int(np.searchsorted(self.arrival_ns, start))
        left_out.expect_few(known, self.source)
        return replace(self, left_out=left_out)

    def expect_deadlines(self) -> None:
        if (self.timeout_ns <= 0).any():
            missing = int((self.timeout_ns <= 0).sum())
            raise InvalidInput(
                f"{missing:,} of {len(self):,} requests of the trace have no deadline ({self.source}): give --slo-scale, "
                "multiples of a request's time on one device, or add `deadline_ms` to the trace"
            )


def span_ns(seconds: float) -> int:
    """Returns the nanoseconds of a part of a trace."""
    if not LEAST_S <= seconds <= MOST_S:
        raise InvalidInput(f"a part of a trace of {seconds:g} seconds: give {LEAST_S:g} to {MOST_S:,.0f}")
    return int(seconds * SECOND)


def power_law(count: int, exponent: float) -> Array:
    """Returns shares of a load that sum to 1, the largest first."""
    weight = np.arange(1, count + 1) ** -float(exponent)
    return weight / weight.sum()


def synthetic(
    rates: dict[str, float], seconds: float, cv: float = 1.0, lengths: Lengths | int = 64, timeout_ms: float = 0, seed: int = 0
) -> Trace:
    """Draws a Gamma process for each unit, with its rate in requests a second. `cv`: of the gaps; 1 is Poisson."""
    rng = np.random.default_rng(seed)
    drawn = [gamma_arrivals(rate, cv, seconds, rng) for rate in rates.values()]
    arrival, unit = _merged(drawn)
    tokens = np.full(len(arrival), lengths) if isinstance(lengths, int) else lengths.draw(len(arrival), rng)
    timeout = np.full(len(arrival), int(timeout_ms * 1e6))
    return Trace(tuple(rates), arrival, unit, tokens, timeout, f"synthetic: Gamma, CV {cv:g}, seed {seed}")


def gamma_arrivals(rate: float, cv: float, seconds: float, rng: np.random.Generator) -> Array:
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


def refitted(trace: Trace, window_s: float, rate: float = 1.0, cv: float = 1.0, seed: int = 0) -> Trace:
    """Fits a Gamma process to each unit's arrivals in each window, scales rate and CV, and draws arrivals from them.

    The last window ends with the trace. Lengths and timeouts are drawn from those of the unit in that window. Clockwork and
    AlpaServe scale traces in this way.
    """
    rng = np.random.default_rng(seed)
    first, last, span = int(trace.arrival_ns[0]), int(trace.arrival_ns[-1]), span_ns(window_s)
    columns: list[tuple[Array, ...]] = []
    for window in trace.windows(window_s):
        start = first + (int(window.arrival_ns[0]) - first) // span * span
        seconds = min(span, last - start + 1) / SECOND
        for unit in np.unique(window.unit).tolist():
            mine = np.flatnonzero(window.unit == unit)
            at = start + gamma_arrivals(rate * len(mine) / seconds, cv * _cv_of(window.arrival_ns[mine]), seconds, rng)
            like = mine[(rng.random(len(at)) * len(mine)).astype(np.int64)]
            columns.append((at, np.full(len(at), unit), window.tokens[like], window.timeout_ns[like]))
    at, unit, tokens, timeout = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    order = np.argsort(at, kind="stable")
    source = (
        f"synthetic: Gamma fitted to windows of {window_s:g} s, rate x {rate:g}, CV x {cv:g}, seed {seed}, of {trace.source}"
    )
    return Trace(trace.names, at[order], unit[order], tokens[order], timeout[order], source, trace.left_out)


def _cv_of(arrival_ns: Array) -> float:
    gaps = np.diff(arrival_ns)
    if len(gaps) < LEAST_GAPS or not gaps.any():
        return 1.0
    return max(0.05, float(gaps.std() / gaps.mean()))


def _merged(streams: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the arrivals of all streams in order, and the number of each one's stream."""
    arrival = np.concatenate(streams)
    order = np.argsort(arrival, kind="stable")
    return arrival[order], np.repeat(np.arange(len(streams)), list(map(len, streams)))[order]
