"""What a server tells its model processes, through their environment and /dev/shm.

Where another program than `TritonServer` has started the server, nothing is told.
"""

from __future__ import annotations

import os

from hplm.server.process_group import SHARED_MEMORY

_ID, _RESTARTS, _UMASK = "HPLM_SERVER_ID", "HPLM_SERVER_RESTARTS", "HPLM_UMASK"


def environment(server_id: str, restarts: int) -> dict[str, str]:
    """Returns the variables for a server's model processes."""
    mask = os.umask(0)
    os.umask(mask)
    return {_ID: server_id, _RESTARTS: str(restarts), _UMASK: str(mask)}


def server_id() -> str | None:
    return os.environ.get(_ID)


def restarts() -> int:
    """Returns how often the server was started again."""
    return int(os.environ.get(_RESTARTS, "0"))


def restore_umask() -> None:
    """Lets other users read what this process writes, if they can read what the server's user writes elsewhere.

    The server process itself keeps everything private: its regions of shared memory hold what clients send.
    """
    if _UMASK in os.environ:
        os.umask(int(os.environ[_UMASK]))


def start_to_drain(server: str) -> None:
    """Makes the server's models refuse new requests."""
    (SHARED_MEMORY / f"{server}-draining").touch()


def draining() -> bool:
    """Whether the server of this process is being stopped."""
    server = server_id()
    return server is not None and (SHARED_MEMORY / f"{server}-draining").exists()
