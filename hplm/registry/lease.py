"""When a server has last seen its registry. Until then it knows of all revoked keys.

The clock goes on while a machine sleeps, and nobody sets it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from hplm.clock import Clock

BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_time(clock: Clock = time) -> float:
    """Returns the seconds since the machine was started."""
    return clock.clock_gettime(time.CLOCK_BOOTTIME)


def save(path: Path, seen: float) -> None:
    """Tells other processes of this machine when the registry was seen."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(f"{seen} {BOOT.read_text('utf-8')}", "utf-8")
    temporary.replace(path)


def load(path: Path) -> float:
    """Returns when the registry was seen. If nobody knows since the machine was started: long ago."""
    with suppress(OSError, ValueError):
        seen, boot = path.read_text("utf-8").split()
        if boot == BOOT.read_text("utf-8").strip():
            return float(seen)
    return float("-inf")
