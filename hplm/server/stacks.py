"""The stacks of the threads of model processes and engines, which these write into the server's log when they get SIGUSR1."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from hplm.server import log, process_group

ASKED = signal.SIGUSR1
LONGEST_WAIT = 5.0  # seconds, for processes that are kept from computing


def of_group(group: int, log_file: Path) -> str:
    """Returns the stacks of the processes of a group that write them into this log when they are asked."""
    begin = log_file.stat().st_size
    for pid in process_group.members(group):  # one after the other, or their lines would mix
        if _is_heard(pid):
            _ask(pid, log_file)
    return log.read(log_file, begin)


def _ask(pid: int, log_file: Path) -> None:
    before = seen = log_file.stat().st_size
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, ASKED)
    deadline = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < deadline:
        time.sleep(0.05)
        size = log_file.stat().st_size
        if before < seen == size:  # it has written, and writes no more
            return
        seen = size


def _is_heard(pid: int) -> bool:
    """Returns whether a process handles the signal, which would end another one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (ASKED - 1) & 1)
