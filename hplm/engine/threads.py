"""Threads that nothing ends but their own last step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)
PAUSE = 0.05  # seconds after an exception, so that a step that always fails does not fill the log at once


def repeat(step: Callable[[], bool], name: str, first: Callable[[], None] = lambda: None) -> threading.Thread:
    """Starts a thread that calls `first`, and then `step` until that returns False.

    An exception is logged, and the next step follows.
    """
    thread = threading.Thread(target=_run, args=(step, name, first), name=name, daemon=True)
    thread.start()
    return thread


def _run(step: Callable[[], bool], name: str, first: Callable[[], None]) -> None:
    try:
        first()
    except Exception:
        log.exception("the thread %r could not be prepared", name)
    while True:
        try:
            if not step():
                return
        except Exception:
            log.exception("a step of the thread %r failed", name)
            time.sleep(PAUSE)
