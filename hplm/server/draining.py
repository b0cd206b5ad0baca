"""Waits for the requests that a server still holds while its models refuse new ones."""

from __future__ import annotations

import time

from hplm.server.held import holders
from hplm.server.process_group import lives

_QUIET_S = 0.2  # a request between two models of an ensemble is held by neither, but for a shorter time than this


def wait_until_idle(server: str, deadline: float) -> int:
    """Returns how many requests living models hold: 0 as soon as they have held none for a moment, else at the deadline."""
    quiet_since = time.monotonic()
    while True:
        held, now = sum(holder.held for holder in holders(server) if lives(holder.pid)), time.monotonic()
        if held:
            quiet_since = now
        if now >= min(deadline, quiet_since + _QUIET_S):
            return held
        time.sleep(0.02)
