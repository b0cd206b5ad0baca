"""Gives the compute thread a lower priority than request threads."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)
NICENESS = 5


def lower_priority() -> None:
    """Lowers the priority of this thread and of the threads that it starts, such as torch's.

    Look-ups, refusals and answers then get a core first. A batch takes a hundred times as long as any of these, so it loses
    little.
    """
    thread = threading.get_native_id()
    try:
        # A process that was started with a higher niceness keeps it: it may not lower it.
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
    except OSError as error:
        log.warning("cannot lower the priority of batches below look-ups and answers: %s", error)
