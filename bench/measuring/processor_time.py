"""The processor time that a server's processes have used: tritonserver, each Python model, and the engine."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # a second


def processor_seconds(server: int) -> dict[str, float]:
    """Returns the seconds by process, of a server and of all that it has started."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The command, field 2, is in parentheses and may contain any text.
                fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            children[int(fields[1])].append(int(folder.name))
            seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    used: defaultdict[str, float] = defaultdict(float)
    waiting = [server]
    while waiting:
        process = waiting.pop()
        used[_name(process)] += seconds.get(process, 0.0)
        waiting += children[process]
    return used


def _name(process: int) -> str:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "ended"
    if "hplm.engine.child" in command:
        return "engine"
    # A Python model is a process whose first argument is the model's file.
    model = next((Path(word) for word in command[1:] if word.endswith("/model.py")), None)
    if model is None:
        return Path(command[0]).name
    folder = model.parent if not model.parent.name.isdigit() else model.parent.parent
    return folder.name.removeprefix("hplm_")
