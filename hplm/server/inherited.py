"""Facts that a server tells its model processes, through their environment and /dev/shm.

Where another program than `TritonServer` has started the server, nothing is told.
"""

from __future__ import annotations

import os

from hplm.server.process_group import SHARED_MEMORY

_ID, _RESTARTS = "HPLM_SERVER_ID", "HPLM_SERVER_RESTARTS"


def environment(server_id: str, restarts: int) -> dict[str, str]:
    """Returns the variables for a server's model processes."""
    return {_ID: server_id, _RESTARTS: str(restarts)}


def server_id() -> str | None:
    return os.environ.get(_ID)


def restarts() -> int:
    """Returns how often the server was started again."""
    return int(os.environ.get(_RESTARTS, "0"))


def start_to_drain(server: str) -> None:
    """Makes the server's models refuse new requests."""
    (SHARED_MEMORY / f"{server}-draining").touch()


def draining() -> bool:
    """Whether the server of this process is being stopped."""
    server = server_id()
    return server is not None and (SHARED_MEMORY / f"{server}-draining").exists()
