"""Facts that a server tells its model processes, through their environment and /dev/shm.

The name of a server's files there begins with its id (HPLM_SERVER_ID or `hplm`), and the number and the start of its process.
So a new server never meets the files of one that has ended. Anybody may write into that folder: only files of the server's own
user and of root are believed.
"""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

from hplm.errors import HplmError
from hplm.server.process_group import SHARED_MEMORY, facts

_ID, _RESTARTS = "HPLM_SERVER_ID", "HPLM_SERVER_RESTARTS"
_SECONDS_BETWEEN_LOOKS = 0.01
_LEAVING, _DRAINING = "-leaving", "-draining"
_STARTED = 19  # in the facts about a process: when it was started, in ticks
SERVER = re.compile(r"(?P<id>.+)-(?P<pid>\d+)-\d+")


def environment(server_id: str, restarts: int) -> dict[str, str]:
    """Returns the variables for a server's model processes."""
    return {_ID: server_id, _RESTARTS: str(restarts)}


def given_id() -> str | None:
    """Returns the id that the environment gives to a server."""
    return os.environ.get(_ID) or None


def server() -> str:
    """Returns the name of the server that this model process belongs to."""
    return server_name(given_id() or "hplm", os.getppid())


def server_name(server_id: str, pid: int) -> str:
    """`pid`: of the server's process, which may have ended."""
    return "-".join([server_id, str(pid), *facts(pid)[_STARTED : _STARTED + 1]])


def is_running(server: str) -> bool:
    """Whether the server of this name runs on this machine, in this container."""
    found = SERVER.fullmatch(server)
    return found is not None and server == server_name(found["id"], int(found["pid"]))


def restarts() -> int:
    """Returns how often the server was started again."""
    return int(os.environ.get(_RESTARTS, "0"))


def is_believed(path: Path, by_all: bool = False) -> bool:
    """Whether a file is there, and of this process's user or of root. `by_all`: or of anybody, for commands of root."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and (by_all or status.st_uid in (0, os.geteuid()))


def start_to_leave(server: str) -> None:
    """Makes probes of the server's models fail, so that routers send no more requests. Models still take those that come."""
    _make(SHARED_MEMORY / f"{server}{_LEAVING}")


def start_to_drain(server: str) -> None:
    """Makes the server's models refuse new requests. Returns when all of them do."""
    _make(SHARED_MEMORY / f"{server}{_DRAINING}")
    time.sleep(_SECONDS_BETWEEN_LOOKS)


def draining() -> list[str]:
    """Returns the names of the servers of this machine that leave or drain."""
    found = {path.name.removesuffix(sign) for sign in (_LEAVING, _DRAINING) for path in SHARED_MEMORY.glob(f"*{sign}")}
    return sorted(filter(is_running, found))


class Drain:
    """Whether the server of this process is being stopped. It is asked for every request, and looks a hundred times a second.

    First `leaving`: probes fail. Then `begun`: all requests are refused.

    To look at a file lets another thread run, for which a request would wait.
    """

    def __init__(self) -> None:
        self._signs = [SHARED_MEMORY / f"{server()}{which}" for which in (_LEAVING, _DRAINING)]
        self._looked = 0.0
        self._are_there = [False, False]

    @property
    def leaving(self) -> bool:
        return any(self._look())

    @property
    def begun(self) -> bool:
        return self._look()[1]

    def _look(self) -> list[bool]:
        now = time.monotonic()
        if now - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._are_there = [is_believed(sign) for sign in self._signs]
        return self._are_there


def _make(sign: Path) -> None:
    if is_believed(sign):
        return
    try:
        sign.unlink(missing_ok=True)  # a file of somebody else has this name
        os.close(os.open(sign, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except OSError as error:
        raise HplmError(f"cannot write {sign} ({error.strerror}): remove it, as root") from error
