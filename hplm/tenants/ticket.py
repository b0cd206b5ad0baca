"""The ticket: the signed result of a lookup. Upper trusts all of it, because no client can make one.

The secret is a file in memory-backed storage, one for each server process. The first of the server's models makes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hplm.errors import NoTenant

_BODY = struct.Struct("<QQQIqqiHHq")
_SIGNATURE_BYTES = 16
TICKET_BYTES = _BODY.size + _SIGNATURE_BYTES  # before what was found
PROBE_TICKET = b"\0"  # of a request that only asks whether the engine works


class Ticket(NamedTuple):
    export: int  # of the snapshot: generations are numbered anew in each export
    generation: int  # of the snapshot in which lookup found the tenant
    uid: int
    version: int
    arrival_ns: int  # CLOCK_MONOTONIC, which all processes of a machine share; at the front door, if there is one
    deadline_ns: int  # 0: no deadline
    priority: int
    top_k: int  # 0: not requested
    rung: int = 0  # of the tenant's tiers that the request asks for, from 1, the dearest; 0: the engine chooses
    waited_ns: int = 0  # from its arrival until lookup got it

    @property
    def received_ns(self) -> int:
        return self.arrival_ns + self.waited_ns

    def sign(self, secret: bytes, found: bytes) -> bytes:
        """Returns the ticket for what the lookup has found."""
        body = _BODY.pack(*self)
        return body + _signature(secret, body, found) + found

    @classmethod
    def check(cls, signed: bytes, secrets: Sequence[bytes]) -> int:
        """Returns which of these secrets the ticket was signed with. Raises if it was none."""
        body, signature, found = signed[: _BODY.size], signed[_BODY.size : TICKET_BYTES], signed[TICKET_BYTES:]
        for number, secret in enumerate(secrets):
            if hmac.compare_digest(signature, _signature(secret, body, found)):
                return number
        raise NoTenant

    @classmethod
    def read(cls, signed: bytes) -> tuple[Ticket, bytes]:
        """Returns a checked ticket and what the lookup has found."""
        return cls._make(_BODY.unpack_from(signed)), signed[TICKET_BYTES:]


def _signature(secret: bytes, body: bytes, found: bytes) -> bytes:
    return hmac.digest(secret, body + found, hashlib.sha256)[:_SIGNATURE_BYTES]


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
