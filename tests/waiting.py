"""Waiting for what another thread or process does, for as long as the slowest machine may take."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds


def eventually(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Returns when the condition holds. Fails if it never does."""
    ends = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < ends, "it has not come true"
        time.sleep(0.05)
