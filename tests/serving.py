"""Servers for tests that do not test how a server ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hplm.server import TritonServer, process_group


@contextmanager
def serving(*repository: object, **options: object) -> Iterator[TritonServer]:
    """Kills the server when the test has passed, because Triton takes three seconds to end."""
    with TritonServer(*repository, **options) as server:
        yield server
        process_group.kill(server.pid)
