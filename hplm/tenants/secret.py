"""The secret that signs forms of requests: a file in memory-backed storage, one for each server process.

The first of the server's models makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path


class SharedSecret:
    """Random bytes that all models of one backbone in one server process share, readable by its user only."""

    def __init__(self, backbone: str, server_pid: int, folder: Path = Path("/dev/shm")) -> None:
        # A process id may be used again, but not with the same start time.
        self.path = folder / f"hplm-secret-{backbone}-{_namespace()}-{server_pid}-{_started(server_pid)}"
        _sweep(folder)
        self.value = self._read_or_make()

    def _read_or_make(self) -> bytes:
        mine = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):
                os.link(mine, self.path)  # atomic: the first link counts, and its file is complete
        finally:
            mine.unlink()
        status = self.path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o177:
            raise PermissionError(f"{self.path} was not made by this server: remove it and start the server again")
        return self.path.read_bytes()


def _namespace() -> int:
    """Returns the number of our namespace of process ids. Containers may share the folder, but not process ids."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> str:
    # The command, field 2, is in parentheses and may contain any text. The start time is field 22.
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]


def _sweep(folder: Path) -> None:
    """Removes the secrets of ended servers, if they ran in our namespace of process ids."""
    for path in folder.glob("hplm-secret-*"):
        owner = re.search(rf"-{_namespace()}-(\d+)-(\d+)(\.\d+)?$", path.name)
        if owner is None or _alive(int(owner[1]), owner[2]):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # already removed, or of another user
            path.unlink()


def _alive(pid: int, started: str) -> bool:
    try:
        return _started(pid) == started
    except (FileNotFoundError, ProcessLookupError):
        return False
