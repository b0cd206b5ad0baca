"""Compares the memory of a server's processes, and the times of answers, after the warm-up and at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadtest.chaos.history import OK, Heard

COMPARED = 6  # the second and the last of so many parts


class ProcessSize(NamedTuple):
    """The memory and the open files of a process."""

    pid: int
    memory: int  # bytes that it does not share: mapped tables are the page cache's
    files: int


def taken(processes: Mapping[str, int]) -> dict[str, ProcessSize]:
    """Returns what each process has, without those that have just ended."""
    found: dict[str, ProcessSize] = {}
    for name, pid in processes.items():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            private = [1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")]
            if private:  # nothing of one that waits for its parent
                found[name] = ProcessSize(pid, private[0], len(list(Path(f"/proc/{pid}/fd").iterdir())))
    return found


def growth(samples: Sequence[Mapping[str, ProcessSize]]) -> dict[str, Any]:
    """Compares the medians of the second sixth and of the last, of each process since its last start."""
    found: dict[str, Any] = {"restarts": {}, "memory_mb": {}, "memory_growth": {}, "files_growth": {}}
    for name in sorted({name for sample in samples for name in sample}):
        every = [sample[name] for sample in samples if name in sample]
        own = [one for one in every if one.pid == every[-1].pid]
        part = max(1, len(own) // COMPARED)
        (_, memory, files), (_, memory_late, files_late) = (
            np.median(some, axis=0) for some in (own[part : 2 * part] or own[:1], own[-part:])
        )
        found["restarts"][name] = len({one.pid for one in every}) - 1
        found["memory_mb"][name] = round(memory_late / 1e6, 1)
        found["memory_growth"][name] = round(memory_late / max(1.0, memory) - 1, 4)
        found["files_growth"][name] = int(files_late - files)
    return found


def later(heard: Iterable[Heard]) -> dict[str, float | None]:
    """Compares the p99 of answers in the second sixth of the time and in the last."""
    answers = np.array([(one.sent, one.ended) for one in heard if one.outcome == OK]).reshape(-1, 2)
    begin, end = (answers[:, 1].min(), answers[:, 1].max()) if len(answers) else (0.0, 0.0)
    bounds = np.linspace(begin, end, COMPARED + 1)
    parts = [answers[(answers[:, 1] >= bounds[at]) & (answers[:, 1] <= bounds[at + 1])] for at in (1, COMPARED - 1)]
    first, last = (float(np.percentile(part[:, 1] - part[:, 0], 99)) if len(part) else None for part in parts)
    return {
        "p99_first_ms": first and round(1000 * first, 2),
        "p99_last_ms": last and round(1000 * last, 2),
        "p99_growth": round(last / first - 1, 3) if first and last else None,
    }
