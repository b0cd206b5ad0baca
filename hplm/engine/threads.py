"""Threads that nothing ends but their own last step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)
PAUSE = 0.05  # seconds after an exception, so that a step that always fails does not fill the log at once


def repeat(step: Callable[[], bool], name: str) -> threading.Thread:
    """Starts a thread that calls `step` until it returns False. An exception is logged, and the next step follows."""
    thread = threading.Thread(target=_run, args=(step, name), name=name, daemon=True)
    thread.start()
    return thread


def _run(step: Callable[[], bool], name: str) -> None:
    while True:
        try:
            if not step():
                return
        except Exception:
            log.exception("a step of the thread %r failed", name)
            time.sleep(PAUSE)
