"""Whether a disk has room for what is about to be written."""

from __future__ import annotations

import shutil
from pathlib import Path

from hplm.errors import OutOfCapacity


class NoSpace(OutOfCapacity):
    """The disk is full. Finished tables are untouched, and the batches written so far are kept."""


def check_room(folder: Path, needed: int, what: str, way_out: str) -> None:
    """Refuses to begin what the file system of a folder has no room for. The folder need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise NoSpace(f"{what} takes {_size(needed)}, but {there} has {_size(free)} of free space: {way_out}")


def bytes_in(*folders: Path) -> int:
    """Returns the size of these files and of all files in these folders. Some may not exist."""
    return sum(path.stat().st_size for folder in folders for path in (folder, *folder.rglob("*")) if path.is_file())


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} bytes"
