"""The requests that a placement has to serve: columns of arrivals, how they are scaled and cut, and which are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.simulate.arrivals import SECOND

LEAST_S, MOST_S = 0.001, 1e9  # seconds of a part of a trace
MOST_NS = 1 << 62  # of a time: differences of two must have 64 bits
WINDOWS = 16  # stretches of a sample
MOST_SHARE = 0.2  # of all requests: a placement for the others would not suit the load
NAMED = 5  # tenants


@dataclass(frozen=True, eq=False)
class LeftOut:
    """The requests of journals that placement leaves out, because the profile does not know their tenants."""

    tenants: Sequence[str] = ()  # of each request

    def __len__(self) -> int:
        return len(self.tenants)

    def expect_few(self, known: int, source: str) -> None:
        """Refuses too many, beside so many requests of known tenants."""
        share = len(self) / max(1, known + len(self))
        if share > MOST_SHARE:
            raise InvalidInput(
                f"{share:.1%} of the requests ({source}) are of {self._whose}. At most {MOST_SHARE:.0%} are left out: if these "
                "tenants are new, measure again with `hplm place profile` and search with the new profile; if they were "
                "deleted, give journals of the time since then"
            )

    @property
    def note(self) -> str:
        return f"note: {len(self):,} requests are left out: they are of {self._whose}"

    @property
    def figures(self) -> dict[str, Any]:
        counts = Counter(self.tenants)
        return {"requests": len(self), "tenants": len(counts), "most": [name for name, _ in counts.most_common(NAMED)]}

    @property
    def _whose(self) -> str:
        tenants, most = self.figures["tenants"], self.figures["most"]
        more = f" and {tenants - NAMED:,} more" if tenants > NAMED else ""
        one_or_more = f"{tenants:,} tenants" if tenants > 1 else "a tenant"
        return f"{one_or_more} that the profile does not know ({', '.join(most)}{more})"


@dataclass(frozen=True, eq=False)
class Trace:
    """Texts in order of arrival. `source` says where they come from, and that synthetic ones are synthetic."""

    names: tuple[str, ...]  # of units
    arrival_ns: Array
    unit: Array  # index in `names`
    tokens: Array
    timeout_ns: Array  # from arrival to deadline; 0: none
    source: str = "synthetic"
    left_out: LeftOut = field(default_factory=LeftOut)

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
    def backbone(self) -> Array:
        """The name of each request's backbone."""
        return np.array([name.split("/")[0] for name in self.names])[self.unit]

    @property
    def counts(self) -> Array:
        """The requests for each unit."""
        return np.bincount(self.unit, minlength=len(self.names))

    def only(self, chosen: Array) -> Trace:
        """Returns the requests with these indexes, or of this mask."""
        columns = self.arrival_ns, self.unit, self.tokens, self.timeout_ns
        arrival_ns, unit, tokens, timeout_ns = (own[chosen] for own in columns)
        return replace(self, arrival_ns=arrival_ns, unit=unit, tokens=tokens, timeout_ns=timeout_ns)

    def busiest(self, seconds: float) -> Trace:
        """Returns the part of so many seconds that has the most requests."""
        span = span_ns(seconds)
        held = np.searchsorted(self.arrival_ns, self.arrival_ns + span) - np.arange(len(self))
        first = int(held.argmax())
        return self.only(np.arange(first, first + int(held[first])))

    def sampled(self, most: int) -> Trace:
        """Returns at most so many requests: evenly spread stretches of the trace, each as long as it was and as bursty."""
        if len(self) <= most:
            return self
        windows = min(WINDOWS, most)
        starts = np.linspace(0, len(self) - most // windows, windows).astype(np.int64)
        return self.only(np.unique(starts[:, None] + np.arange(most // windows)))

    def at_rate(self, factor: float) -> Trace:
        """Returns the same requests at so many times their rate. Their deadlines stay as far away."""
        if factor == 1:
            return self
        if self.arrival_ns[-1] / factor > MOST_NS:
            raise InvalidInput(f"at {factor:g} times its rate the trace has times of more than 64 bits: give a higher --rate")
        arrival_ns = (self.arrival_ns / factor).astype(np.int64)
        return replace(self, arrival_ns=arrival_ns, source=f"{self.source}, rate x {factor:g}")

    def with_timeouts(self, timeout_ns: Array) -> Trace:
        return replace(self, timeout_ns=np.clip(timeout_ns, 1, MOST_NS).astype(np.int64))

    def expect_known(self) -> None:
        """Refuses a trace that leaves too much out."""
        self.left_out.expect_few(len(self), self.source)

    def expect_deadlines(self) -> None:
        if (self.timeout_ns <= 0).any():
            missing = int((self.timeout_ns <= 0).sum())
            raise InvalidInput(
                f"{missing:,} of {len(self):,} requests of the trace have no deadline ({self.source}): give --slo-scale, "
                "multiples of a request's time on one device, or add `deadline_ms` to the trace"
            )


def span_ns(seconds: float, what: str = "a part of a trace") -> int:
    """Returns the nanoseconds of a part of a trace."""
    if not LEAST_S <= seconds <= MOST_S:
        raise InvalidInput(f"{what} of {seconds:g} seconds: give {LEAST_S:g} to {MOST_S:,.0f}")
    return int(seconds * SECOND)
