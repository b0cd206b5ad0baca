"""Quarantined tenants: those whose requests ended the engine, and that are not computed until they are released.

Each is an empty file in /dev/shm. A server may be unable to write into its repository and its state, and another machine's
engine may be of another opinion. The files outlive the server's processes, but not the machine or its container.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from hplm.errors import InvalidInput, Quarantined
from hplm.tenants.state import EXPORTED_TENANTS

SECONDS = 3600.0  # after which a tenant is released by itself
FOLDER = Path("/dev/shm")


class Quarantine:
    """The quarantined tenants of one backbone on this machine."""

    def __init__(self, backbone: Path) -> None:
        """`backbone`: its folder in the model repository."""
        digest = hashlib.sha256(os.fsencode(backbone.resolve())).hexdigest()
        self._begin = f"hplm-quarantine-{digest[:16]}-"

    def put(self, tenant_id: str) -> None:
        self._file(tenant_id).touch(0o600)

    def release(self, tenant_id: str) -> bool:
        """Returns whether the tenant was quarantined."""
        try:
            self._file(tenant_id).unlink()
        except FileNotFoundError:
            return False
        return True

    def tenants(self, now: float) -> frozenset[str]:
        """Returns the ids of quarantined tenants, and releases those whose time has passed. `now`: Unix seconds."""
        found: set[str] = set()
        for name in os.listdir(FOLDER):
            if not name.startswith(self._begin):
                continue
            with suppress(FileNotFoundError):  # released meanwhile
                status = (FOLDER / name).lstat()
                if os.geteuid() not in (0, status.st_uid):  # anybody may write into this folder
                    continue
                if now < status.st_mtime + SECONDS:
                    found.add(name.removeprefix(self._begin))
                else:
                    (FOLDER / name).unlink()
        return frozenset(found)

    def _file(self, tenant_id: str) -> Path:
        return FOLDER / f"{self._begin}{tenant_id}"


def release(tenant_id: str, repository: Path, backbone: str | None = None) -> list[str]:
    """Releases a tenant of a repository. Returns the backbones for which it was quarantined. Raises if there is none."""
    folders = sorted(path.parent.parent for path in repository.glob(f"{backbone or '*'}/1/{EXPORTED_TENANTS}"))
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
