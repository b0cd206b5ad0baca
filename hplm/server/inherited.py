"""Facts that a server tells its model processes, through their environment and /dev/shm.

Where another program than `TritonServer` has started the server, nothing is told.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hplm.server.process_group import SHARED_MEMORY

_ID, _RESTARTS = "HPLM_SERVER_ID", "HPLM_SERVER_RESTARTS"
_SECONDS_BETWEEN_LOOKS = 0.01


def environment(server_id: str, restarts: int) -> dict[str, str]:
    """Returns the variables for a server's model processes."""
    return {_ID: server_id, _RESTARTS: str(restarts)}


def server_id() -> str | None:
    return os.environ.get(_ID)


def restarts() -> int:
    """Returns how often the server was started again."""
    return int(os.environ.get(_RESTARTS, "0"))


def start_to_drain(server: str) -> None:
    """Makes the server's models refuse new requests. Returns when all of them do."""
    _sign_of(server).touch()
    time.sleep(_SECONDS_BETWEEN_LOOKS)


class Drain:
    """Whether the server of this process is being stopped. It is asked for every request, and looks a hundred times a second.

    To look at a file lets another thread run, for which a request would wait.
    """

    def __init__(self) -> None:
        server = server_id()
        self._sign = _sign_of(server) if server else None
        self._looked = 0.0
        self._begun = False

    @property
    def begun(self) -> bool:
        now = time.monotonic()
        if self._sign is not None and now - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._begun = self._sign.exists()
        return self._begun


def _sign_of(server: str) -> Path:
    """Returns the file that is there while a server is being stopped."""
    return SHARED_MEMORY / f"{server}-draining"
