"""Who gets a core first: what is short."""

from __future__ import annotations

import os
import threading

NICENESS = 5


def let_others_go_first() -> None:
    """This thread and those it starts, as torch does for its products, give way to those that look up, refuse and answer.

    A batch takes a hundred times as long as any of these, and loses nothing but what they need.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
