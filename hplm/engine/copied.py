"""Metrics of a state that follows another machine's. Its follower, a process of its own, leaves them in a file."""

from __future__ import annotations

from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.tenants.followed import Heard
from hplm.tenants.state import ALIVE_SECONDS, State


def measure_copy(meter: Meter, state: State | None, now: float) -> None:
    """Sets how far a copy is behind its source. Sets nothing if the state is no copy. `now`: Unix time."""
    heard = Heard.load(state.heard) if state is not None else None
    if heard is None:
        return
    meter.set(names.COPY_BEHIND_SECONDS, max(0.0, now - heard.equal))
    meter.set(names.SOURCE_ANSWERS, float(now - heard.answered < ALIVE_SECONDS))
