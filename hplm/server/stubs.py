"""Triton's Python model processes ("stubs") and their regions of shared memory, as /proc and /dev/shm show them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from hplm.server import process_group
from hplm.server.installation import STUB

_REGION = "-region-"
_INSTANCE = re.compile(r"(?P<model>.+?)(_\d+){1,2}")  # how a stub's arguments name the model's instance


class Stub(NamedTuple):
    pid: int
    model: str
    region: Path


def region_prefix(server: str) -> str:
    """Returns how the names of a server's regions begin."""
    return f"{server}{_REGION}"


def regions(server: str) -> list[Path]:
    return list(process_group.SHARED_MEMORY.glob(f"{region_prefix(server)}*"))


def make_private(server: str) -> None:
    """Keeps other users from the regions, which hold what clients send. Triton makes them readable, whatever the umask is."""
    for region in regions(server):
        with contextlib.suppress(FileNotFoundError):  # its process has just ended
            region.chmod(0o600)


def stubs(group: int | None) -> list[Stub]:
    """Returns the living stubs of a server's process group. Without one there are none."""
    found: list[Stub] = []
    for pid in process_group.members(group):
        arguments = process_group.arguments(pid)
        names = [argument for argument in arguments if _REGION in argument]
        models = [match["model"] for argument in arguments if (match := _INSTANCE.fullmatch(argument))]
        if arguments and arguments[0].endswith(STUB) and names and models:
            found.append(Stub(pid, _own_name(arguments) or models[-1], process_group.SHARED_MEMORY / names[0]))
    return found


def _own_name(arguments: list[str]) -> str | None:
    """Returns the name of a model whose code is in its own folder. Its number could be taken for that of an instance."""
    folder = Path(arguments[1]).parent.parent.name
    return folder if any(argument.startswith(f"{folder}_") for argument in arguments[2:]) else None
