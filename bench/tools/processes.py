"""Reads the memory of a process and of all processes that it started."""

from __future__ import annotations

from dataclasses import dataclass
from glob import glob
from pathlib import Path

from hplm.server import TritonServer

NONE = "0 kB"  # the memory of a process that has ended


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    resident: int  # with the pages of mapped files, which count in each process that has them
    private: int  # without the pages of mapped files


def memory_of(pid: int) -> Memory:
    resident = private = 0
    for process in (pid, *_descendants(pid)):
        fields = dict(line.split(":", 1) for line in _read(f"/proc/{process}/status").splitlines())
        resident += _bytes(fields.get("VmRSS", NONE))
        private += _bytes(fields.get("RssAnon", NONE))
    return Memory(resident, private)


def memory_of_server(server: TritonServer) -> Memory:
    """Returns the memory of a running server, with the processes of its models."""
    assert server.pid is not None
    return memory_of(server.pid)


def _read(path: str) -> str:
    """Returns "" if the process or thread has ended since it was found."""
    try:
        return Path(path).read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _bytes(field: str) -> int:
    number, unit = field.split()
    assert unit == "kB"
    return int(number) * 1024


def _descendants(pid: int) -> list[int]:
    found = []
    for children in glob(f"/proc/{pid}/task/*/children"):  # Path.glob would raise if a process ends meanwhile
        for child in map(int, _read(children).split()):
            found += [child, *_descendants(child)]
    return found
