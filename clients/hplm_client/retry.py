"""Decides when a request may be sent again, and how long each attempt may take.

Inference changes nothing on the server, so a second attempt gets the same answer. But it also gives the server the same work
twice, and clients mostly time out or lose their connection when the server is overloaded. So only requests that the server has
certainly not taken are sent again (SafeToRetry). After a timeout or a lost connection the caller must decide.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from numbers import Real

from hplm_client.errors import InvalidInput, SafeToRetry

GRACE_S = 1.0  # how long after the deadline the client waits for the server's own error about it
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
LONGEST_WAIT_S = 1_000_000.0  # eleven days; a socket cannot wait for much longer


def check_time(name: str, value: object, unit: str, most: float, otherwise: str = "") -> None:
    """Raises if this is no time above 0."""
    if not isinstance(value, Real) or not 0 < float(value) <= most:
        raise InvalidInput(f"{name} is {value!r}: give {unit} above 0, {most:,.0f} at most{otherwise}")


class Attempts:
    """The attempts at the requests of one call: as many for each as `retries` allows, and all within one deadline."""

    def __init__(
        self,
        retries: int,
        deadline_ms: float | None,
        network_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        die: Callable[[], float] = random.random,
    ) -> None:
        if deadline_ms is not None:
            check_time("deadline_ms", deadline_ms, "milliseconds", 1000 * LONGEST_WAIT_S, ", or None for the tenant's own")
        self._retries = retries
        self._has_deadline = deadline_ms is not None
        self._network_timeout = network_timeout
        self._clock = clock
        self._die = die
        self._ends = clock() + (network_timeout if deadline_ms is None else float(deadline_ms) / 1000)
        self.begin()
        self.part_s = self.network_s  # the longest wait for a later part of a stream, from which attempts take nothing

    def begin(self) -> None:
        """Begins with another request of the call. Without a deadline it has as much time as the first."""
        self._retries_left, self._pause = self._retries, FIRST_PAUSE_S
        if not self._has_deadline:
            self._ends = self._clock() + self._network_timeout

    @property
    def late_s(self) -> float:
        """The time since the deadline; 0 or less: it is still to come, or there is none."""
        return -self._remaining() if self._has_deadline else 0.0

    @property
    def timeout_us(self) -> int | None:
        """Triton's `timeout` for the next attempt; None means the tenant's default."""
        return max(1, round(self._remaining() * 1e6)) if self._has_deadline else None

    @property
    def network_s(self) -> float:
        """The longest time of the next call, which is the search for the backbone or an attempt."""
        return max(0.0, self._remaining() + (GRACE_S if self._has_deadline else 0.0))

    def pause_s(self, error: SafeToRetry) -> float:
        """Returns how long to wait before the next attempt. Raises `error` if no attempt or no time is left."""
        hint = error.retry_after_s
        if hint is None:
            pause = self._pause * (0.5 + 0.5 * self._die())
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        else:
            pause = hint * (1 + 0.5 * self._die())  # never earlier than the hint, and clients not all at once
        if self._retries_left == 0 or pause >= self._remaining():
            raise error
        self._retries_left -= 1
        return pause

    def _remaining(self) -> float:
        return self._ends - self._clock()
