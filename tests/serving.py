"""Servers of tests that do not ask how one ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hplm.server import TritonServer, process_group


@contextmanager
def serving(*repository: object, **options: object) -> Iterator[TritonServer]:
    """Killed in the end, once the test has passed: Triton takes three seconds to say goodbye."""
    with TritonServer(*repository, **options) as server:
        yield server
        process_group.kill(server.pid)
