"""How many requests each model process holds, written where it outlives the process.

These are files in /dev/shm whose names begin with the server's id, so that the server sweeps them when it stops. A process
without such an id, because another program has started the server, writes nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import NamedTuple

from hplm.server.inherited import server_id
from hplm.server.process_group import SHARED_MEMORY

_COUNT = struct.Struct("<q")
_HELD = "-held-"


class Held:
    """Counts the requests of this model process that wait for an answer."""

    def __init__(self, model: str) -> None:
        self._lock = threading.Lock()
        self._count = 0
        server = server_id()
        self._path = SHARED_MEMORY / f"{server}{_HELD}{os.getpid()}@{model}" if server else None
        self._shown = _map(self._path) if self._path else bytearray(_COUNT.size)

    def add(self, count: int) -> None:
        """Requests were taken, or (below 0) answered."""
        with self._lock:
            self._count += count
            _COUNT.pack_into(self._shown, 0, self._count)

    def close(self) -> None:
        if self._path:
            self._path.unlink(missing_ok=True)


class Holder(NamedTuple):
    """A model process that counts what it holds, alive or dead."""

    path: Path
    pid: int
    model: str

    @property
    def held(self) -> int:
        with contextlib.suppress(FileNotFoundError):  # the process has just ended well
            return _COUNT.unpack(self.path.read_bytes())[0]
        return 0


def holders(server: str) -> list[Holder]:
    """Returns the server's model processes that count what they hold. Others answer before their `execute` ends."""
    found: list[Holder] = []
    for path in SHARED_MEMORY.glob(f"{server}{_HELD}*@*"):
        pid, _, model = path.name.partition(_HELD)[2].partition("@")
        found.append(Holder(path, int(pid), model))
    return found


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, bytes(_COUNT.size))
        return mmap.mmap(descriptor, _COUNT.size)
    finally:
        os.close(descriptor)
