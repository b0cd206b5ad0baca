"""The number of requests that each model process holds, written where it outlives the process.

These are files in /dev/shm whose names begin with the server's (`inherited`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hplm.server import inherited
from hplm.server.process_group import SHARED_MEMORY, lives

_COUNT = struct.Struct("<qq")  # requests, and when the last one was answered: nanoseconds of the monotonic clock
_HELD = "-held-"
LOOK_SECONDS = 1.0  # between looks at which processes a model has
QUIET_SECONDS = 0.2  # a request between two models of an ensemble is held by neither, but for a shorter time than this
RECENT_NS = 2_000_000_000  # longer than the supervisor needs to see that a process has ended


class Held:
    """Counts the requests of this model process that wait for an answer."""

    def __init__(self, model: str) -> None:
        self._lock = threading.Lock()
        self._count = self._answered_ns = 0
        self._path = SHARED_MEMORY / f"{inherited.server()}{_HELD}{os.getpid()}@{model}"
        self._shown = _map(self._path)

    def take(self, requests: int = 1) -> None:
        with self._lock:
            self._count += requests
            self._show()

    def answered(self, requests: int = 1) -> None:
        with self._lock:
            self._count -= requests
            self._answered_ns = time.monotonic_ns()
            self._show()

    def forget(self) -> None:
        """Takes a request out of the count. Nobody would miss its answer."""
        with self._lock:
            self._count -= 1
            self._show()

    def _show(self) -> None:
        _COUNT.pack_into(self._shown, 0, self._count, self._answered_ns)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Holder(NamedTuple):
    """A model process that counts what it holds, alive or dead."""

    path: Path
    server: str
    pid: int
    model: str

    @property
    def lives(self) -> bool:
        return lives(self.pid) and inherited.is_running(self.server)

    @property
    def held(self) -> int:
        return self._read()[0]

    @property
    def may_have_lost(self) -> bool:
        """Whether requests may stay without an answer if the process has just ended. Triton can lose those just sent, too."""
        held, answered_ns = self._read()
        return held > 0 or time.monotonic_ns() - answered_ns < RECENT_NS

    def _read(self) -> tuple[int, int]:
        with contextlib.suppress(FileNotFoundError):  # the process has just ended well
            shown = self.path.read_bytes()
            if len(shown) == _COUNT.size:  # otherwise the process has not shown anything yet
                return _COUNT.unpack(shown)
        return 0, 0


def holders(server: str = "", by_all: bool = False) -> list[Holder]:
    """Returns the model processes that count what they hold, of the servers with this id or name, or of all servers.

    Others answer before their `execute` ends. `by_all`: believes the files of all users, for commands of root.
    """
    found: list[Holder] = []
    for path in SHARED_MEMORY.glob(f"*{_HELD}*@*"):
        name, _, rest = path.name.partition(_HELD)
        pid, _, model = rest.partition("@")
        own = inherited.SERVER.fullmatch(name)
        if own and pid.isdigit() and server in ("", name, own["id"]) and inherited.is_believed(path, by_all):
            found.append(Holder(path, name, int(pid), model))
    return found


class HeldBy:
    """Counts the requests that another model of the same server holds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._server = inherited.server()
        self._shown: list[mmap.mmap] = []  # what each of its processes shows
        self._looked = -LOOK_SECONDS

    @property
    def count(self) -> int:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            own = [one for one in holders(self._server) if one.model == self._model]
            self._shown = [shown for one in own for shown in _mapped(one.path)]
            self._looked = time.monotonic()
        return sum(_COUNT.unpack_from(shown)[0] for shown in self._shown)


def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Yields what a process shows, if it still runs and has shown something."""
    with contextlib.suppress(FileNotFoundError, ValueError), path.open("rb") as file:
        yield mmap.mmap(file.fileno(), _COUNT.size, access=mmap.ACCESS_READ)


def _map(path: Path) -> mmap.mmap:
    path.unlink(missing_ok=True)  # of an ended process that had the same number
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, bytes(_COUNT.size))
        return mmap.mmap(descriptor, _COUNT.size)
    except OSError:  # /dev/shm is full
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def running_servers(server_id: str = "") -> list[str]:
    """Returns the names of the servers of this machine whose models count what they hold. Root sees those of all users."""
    return sorted({one.server for one in holders(server_id, by_all=os.geteuid() == 0) if one.lives})


def wait_until_idle(server: str, deadline: float, by_all: bool = False) -> int:
    """Returns how many requests living models hold: 0 as soon as they have held none for a moment, else at the deadline."""
    quiet_since = time.monotonic()
    while True:
        held, now = sum(one.held for one in holders(server, by_all) if one.lives), time.monotonic()
        if held:
            quiet_since = now
        if now >= min(deadline, quiet_since + QUIET_SECONDS):
            return held
        time.sleep(0.02)
