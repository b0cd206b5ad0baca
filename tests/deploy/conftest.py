"""Front doors: one before the real server `toy` in a module, and before a fake of Triton one of each configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from loadtest.proxy import CONFIG
from tests.cluster.fake_server import FakeServer
from tests.cluster.front import CLOSED
from tests.deploy.door import DoorToAsk, haproxy, require_haproxy
from tests.support.servers import Servers
from tests.support.wait import eventually

Opens = Callable[..., DoorToAsk]
TABLES = "door few_of_address more_of_address tenants_in_flight large_addresses medium_addresses"


@pytest.fixture(scope="module")
def door(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorToAsk]:
    require_haproxy()
    server = servers.get("toy")
    with haproxy(tmp_path_factory.mktemp("door"), server.http_url, server.grpc_url, "toy other") as door:
        yield door


@pytest.fixture(scope="session")
def _doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Opens]]:
    require_haproxy()
    # It counts over an hour instead of ten seconds, so all requests of a test count together, whatever the machine pauses.
    lasting = tmp_path_factory.mktemp("lasting") / "haproxy.cfg"
    lasting.write_text(CONFIG.read_text("utf-8").replace("(10s)", "(1h)").replace("expire 1m", "expire 2h"), "utf-8")
    doors = dict[str, DoorToAsk]()
    with FakeServer("toy", larger_than=1000) as fake, ExitStack() as stack:

        def opened(http: str = fake.http_url, grpc: str = fake.grpc_url, **settings: object) -> DoorToAsk:
            key = f"{http} {grpc} {settings}"
            if key not in doors:
                folder = tmp_path_factory.mktemp("d")  # a socket's path must be short
                given = {"HPLM_DOOR_SOCKET": folder / "socket", **settings}
                doors[key] = stack.enter_context(haproxy(folder, http, grpc, "toy", config=lasting, **given))
            door = doors[key]
            if CLOSED not in (http, grpc):
                eventually(lambda: door.infer(source="127.0.0.9") is None)
            for table in TABLES.split():
                door.socket.ask(f"clear table {table}")
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
