"""The memory of the machine or, in a container, of its limit."""

from __future__ import annotations

from pathlib import Path


def machine_memory(group: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Returns its bytes, and how many of them are free. Cached file pages count as free."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    whole, free = (1024 * int(told[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    try:
        limit, used = ((group / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except FileNotFoundError:  # no container, or an older kernel
        return whole, free
    if limit == "max":
        return whole, free
    return min(whole, int(limit)), min(free, int(limit) - int(used) + int(pages["inactive_file"]))
