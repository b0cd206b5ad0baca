"""Stops the process group of a tritonserver and its stubs, and removes their shared memory.

Run as a script, this file is the watchdog: it stops the group when the process that started it is gone for any reason.
PR_SET_PDEATHSIG is no alternative: it needs code between fork and exec, and fires when the starting *thread* ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
KILL_SECONDS = 10.0  # that a killed process may take to end; a driver or a disk may keep it for longer
ENDED = ("Z", "X")  # states of a process
_ORPHANED_GRACE_S = 5.0


def members(group: int | None) -> list[int]:
    """Returns the living processes of the group, without zombies. Without a group there are none."""
    found = {int(folder.name): facts(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    return [pid for pid, (state, _, own, *_) in found.items() if own == str(group) and state not in ENDED]


def lives(pid: int) -> bool:
    """Whether a process has not ended. A zombie has."""
    return facts(pid)[0] not in ENDED


def computed_ns(pids: Iterable[int]) -> int:
    """Returns the time that the living ones of these processes have computed so far, in nanoseconds. It is counted in ticks."""
    ticks = sum(int(ticks) for pid in pids for ticks in facts(pid)[11:13])  # in user mode and in the kernel
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def arguments(pid: int) -> list[str]:
    """Returns the command line of a process, or nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def sockets(pid: int) -> dict[int, str]:
    """Returns the names of a process's sockets, by descriptor."""
    found: dict[int, str] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if (name := os.readlink(link)).startswith("socket:"):
                found[int(link.name)] = name
    return found


def kill_one(pid: int) -> None:
    """Kills a process of a group, and returns when it has ended, or a driver or a disk keeps it."""
    _signal(os.kill, pid, signal.SIGKILL)
    _wait_until(lambda: not lives(pid), KILL_SECONDS)


def kill(group: int) -> None:
    """Kills all processes of a group, and returns when they have ended, or a driver or a disk keeps one."""

    def is_empty() -> bool:
        left = members(group)
        if left:  # also what they have started meanwhile
            _signal(os.killpg, group, signal.SIGKILL)
        return not left

    _wait_until(is_empty, KILL_SECONDS)


def reason(code: int) -> str:
    """Returns how a process has ended, from its exit code."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def sweep(prefix: str) -> None:
    """Removes the shared-memory regions that killed stubs leave behind."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def facts(pid: int) -> list[str]:
    """Returns what /proc/PID/stat says behind the command: the process's state, its parent, its group, ..."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        found = []
    return found or ["X", "", ""]


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has just ended
        send(target, number)


def watch(parent: int, group: int, prefix: str, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    if group in members(group):  # the leader lives
        _signal(os.kill, group, signal.SIGTERM)
    _wait_until(lambda: not members(group), _ORPHANED_GRACE_S)
    kill(group)
    sweep(prefix)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
