"""Front doors before stand-ins for Triton: one of each configuration in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.door import DoorToAsk, command, haproxy, require_haproxy
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.support.wait import eventually

Opens = Callable[..., DoorToAsk]


@pytest.fixture(scope="session")
def _doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Held, Opens]]:
    require_haproxy()
    held, doors = Held(larger_than=1000), dict[str, DoorToAsk]()
    with http_stand_in(held) as http, grpc_stand_in(held) as grpc, ExitStack() as stack:

        def opened(http: str = http, grpc: str = grpc, **settings: object) -> DoorToAsk:
            key = f"{http} {grpc} {settings}"
            if key not in doors:
                folder: Path = tmp_path_factory.mktemp("d")  # a socket's path must be short
                given = {"HPLM_DOOR_SOCKET": folder / "socket", **settings}
                doors[key] = stack.enter_context(haproxy(folder, http, grpc, "toy", **given))
            door = doors[key]
            if "127.0.0.1:1" not in (http, grpc):
                eventually(lambda: door.infer(source="127.0.0.9") is None)
            for table in (
                "door",
                "few_of_address",
                "more_of_address",
                "tenants_in_flight",
                "large_addresses",
                "medium_addresses",
            ):
                command(door.socket, f"clear table {table}")
            return door

        yield held, opened
        held.may_answer.set()


@pytest.fixture
def held(_doors: tuple[Held, Opens]) -> Iterator[Held]:
    """The requests that the stand-ins have and do not answer yet."""
    held, _ = _doors
    held.begin()
    yield held
    held.may_answer.set()
    eventually(lambda: not held.count)


@pytest.fixture
def opened(_doors: tuple[Held, Opens], held: Held) -> Opens:
    """Returns a door with these settings. No earlier request counts for its limits."""
    return _doors[1]
