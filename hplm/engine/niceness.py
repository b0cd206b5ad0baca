"""Who gets a core first: what is short."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)
NICENESS = 5


def lower_priority() -> None:
    """This thread and those it starts, as torch does for its products, give way to those that look up, refuse and answer.

    A batch takes a hundred times as long as any of these, and loses nothing but what they need.
    """
    thread = threading.get_native_id()
    try:
        # Who was started with more gives way already, and may not take it back.
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
    except OSError as error:
        log.warning("batches do not give way to look-ups and answers: %s", error)
