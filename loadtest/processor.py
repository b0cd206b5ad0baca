"""Measures which processes use the processor: those of the server, the front door, the clients, and all others."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")

Pids = Callable[[], Iterable[int]]


class ProcessorTime:
    """Counts from its creation on. `served_by`: finds the processes of each named part, which all go on to the end.

    Clients are processes that were started here, and that ended meanwhile.
    """

    def __init__(self, served_by: dict[str, Pids]) -> None:
        self._served_by = served_by
        self._began, self._before, self._busy = time.monotonic(), self._seconds(), _busy()

    def cores(self) -> dict[str, float]:
        """Returns how many cores each part has used on average, and the `others` of this machine."""
        wall = time.monotonic() - self._began
        used = {name: (seconds - self._before[name]) / wall for name, seconds in self._seconds().items()}
        used["others"] = max(0.0, (_busy() - self._busy) / wall - sum(used.values()))
        return {name: round(cores, 2) for name, cores in used.items()}

    def _seconds(self) -> dict[str, float]:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = {name: sum(map(_of_process, pids())) for name, pids in self._served_by.items()}
        return {"clients": ended.ru_utime + ended.ru_stime, **seconds}


def _of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _busy() -> float:
    """Returns the seconds that the cores of this machine were busy since it started."""
    user, nice, system, _idle, _iowait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / _TICKS
