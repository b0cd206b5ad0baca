"""Free ports for servers that must be told one, and that start some time later."""

from __future__ import annotations

import random
import socket

GIVEN_TO_NOBODY = range(20_000, 32_768)  # below those that Linux gives to clients, and to servers that ask for any port


def free_port() -> int:
    """Returns a port of this machine that the system gives to no other process meanwhile."""
    for port in random.SystemRandom().sample(GIVEN_TO_NOBODY, 100):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("a hundred ports are in use")
