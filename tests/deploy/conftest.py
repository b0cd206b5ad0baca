"""Front doors before a fake of Triton: one of each configuration in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.fake_server import FakeServer
from tests.deploy.door import DoorToAsk, command, haproxy, require_haproxy
from tests.support.wait import eventually

Opens = Callable[..., DoorToAsk]
TABLES = "door few_of_address more_of_address tenants_in_flight large_addresses medium_addresses"


@pytest.fixture(scope="session")
def _doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Opens]]:
    require_haproxy()
    fake, doors = FakeServer("toy", larger_than=1000), dict[str, DoorToAsk]()
    with ExitStack() as stack:
        stack.callback(fake.close)

        def opened(http: str = fake.http, grpc: str = fake.grpc, **settings: object) -> DoorToAsk:
            key = f"{http} {grpc} {settings}"
            if key not in doors:
                folder: Path = tmp_path_factory.mktemp("d")  # a socket's path must be short
                given = {"HPLM_DOOR_SOCKET": folder / "socket", **settings}
                doors[key] = stack.enter_context(haproxy(folder, http, grpc, "toy", **given))
            door = doors[key]
            if "127.0.0.1:1" not in (http, grpc):
                eventually(lambda: door.infer(source="127.0.0.9") is None)
            for table in TABLES.split():
                command(door.socket, f"clear table {table}")
            return door

        yield fake, opened


@pytest.fixture
def held(_doors: tuple[FakeServer, Opens]) -> Iterator[FakeServer]:
    """Triton's fake, which holds the test's requests until it is told to answer."""
    fake, _ = _doors
    fake.refusal = ""
    fake.hold()
    yield fake
    fake.release()
    eventually(lambda: not fake.count)


@pytest.fixture
def opened(_doors: tuple[FakeServer, Opens], held: FakeServer) -> Opens:
    """Returns a door with these settings. No earlier request counts for its limits."""
    return _doors[1]
