"""Memory of a process and all that it started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    resident: int  # with the pages of mapped files, counted in each process that has them
    private: int  # without


def memory_of(pid: int) -> Memory:
    resident = private = 0
    for process in (pid, *_descendants(pid)):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines())
        resident += _bytes(fields["VmRSS"])
        private += _bytes(fields["RssAnon"])
    return Memory(resident, private)


def _bytes(field: str) -> int:
    number, unit = field.split()
    assert unit == "kB"
    return int(number) * 1024


def _descendants(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text("ascii").split()):
            found += [child, *_descendants(child)]
    return found
