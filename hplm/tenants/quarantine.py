"""Quarantined tenants: those whose requests ended the engine, and that are not computed until they are released.

Each is an empty file in /dev/shm. A server may be unable to write into its repository and its state, and another machine's
engine may be of another opinion. The files outlive the server's processes, but not the machine or its container. Anybody may
write into that folder, so a server believes only files of its own user.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from hplm.errors import InvalidInput, Quarantined
from hplm.tenants.state import exported_folders

SECONDS = 3600.0  # after which a tenant is released by itself
FOLDER = Path("/dev/shm")


class Quarantine:
    """The quarantined tenants of one backbone on this machine."""

    def __init__(self, backbone: Path, folder: Path = FOLDER, user: int | None = None) -> None:
        """`backbone`: its folder in the model repository. `user`: whose files are believed; None: this process's."""
        self._folder = folder
        self._user = os.geteuid() if user is None else user
        digest = hashlib.sha256(os.fsencode(backbone.resolve())).hexdigest()
        self._begin = f"hplm-quarantine-{digest[:16]}-"

    def put(self, tenant_id: str) -> None:
        """Quarantines a tenant from now on. Raises OSError if its file cannot be written, such as one of another user."""
        path = self._file(tenant_id)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # no wait at a pipe
        try:
            if not _is_of(os.fstat(descriptor), self._user):
                raise FileExistsError(errno.EEXIST, "what has its name is no file of this user", str(path))
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def release(self, tenant_id: str) -> bool:
        """Returns whether the tenant was quarantined."""
        try:
            self._file(tenant_id).unlink()
        except FileNotFoundError:
            return False
        return True

    def tenants(self, now: float, own: bool = False) -> frozenset[str]:
        """Returns the ids of quarantined tenants, and releases those whose time has passed. `now`: Unix seconds.

        `own`: believes only this user's files, as a server must. Otherwise root, who runs a command, sees those of all users.
        """
        owner = None if self._user == 0 and not own else self._user
        found: set[str] = set()
        for name in os.listdir(self._folder):
            if not name.startswith(self._begin):
                continue
            with suppress(FileNotFoundError):  # released meanwhile
                status = (self._folder / name).lstat()
                if not _is_of(status, owner):
                    continue
                if abs(now - status.st_mtime) < SECONDS:  # also if the clock was set back since
                    found.add(name.removeprefix(self._begin))
                else:
                    (self._folder / name).unlink()
        return frozenset(found)

    def _file(self, tenant_id: str) -> Path:
        return self._folder / f"{self._begin}{tenant_id}"


def _is_of(status: os.stat_result, owner: int | None) -> bool:
    """Whether this is a file, and this user's."""
    return stat.S_ISREG(status.st_mode) and owner in (None, status.st_uid)


def release(tenant_id: str, repository: Path, backbone: str | None = None) -> list[str]:
    """Releases a tenant of a repository. Returns the backbones for which it was quarantined. Raises if there is none."""
    folders = [folder.parent for folder in exported_folders(repository, backbone)]
    released = [folder.name for folder in folders if Quarantine(folder).release(tenant_id)]
    if not released:
        raise InvalidInput(
            f"tenant {tenant_id!r} of {repository} is not quarantined on this machine: run this where the server runs, in its "
            "container if it has one, and name its model repository with --repository"
        )
    return released


def refusal(tenant_id: str) -> Quarantined:
    """Returns the error for a request of a quarantined tenant."""
    return Quarantined(
        f"tenant {tenant_id!r} is quarantined for up to {SECONDS / 60:g} minutes, because the engine ended twice while it "
        f"computed its requests: find the cause in the server's log, then run `hplm tenant release {tenant_id}` there"
    )
