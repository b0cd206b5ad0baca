"""Deadlines count from a request's arrival at the front door: the real HAProxy before a real Triton."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from tritonclient.utils import InferenceServerException

from hplm_client.errors import DeadlineMissed, refusal
from testing.toy import WORDS
from tests.deploy.door import StockAtDoor, haproxy, require_haproxy
from tests.server.stock import LIBRARIES, Stock
from tests.support.servers import published
from tests.support.threaded_server import ThreadedServer
from tests.support.wait import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

MODELS = ("toy", "hplm")
TIME_ENOUGH_US = 600_000_000
SOON_US = 400_000
BEFORE_LOOKUP = "hplm_before_lookup_seconds"


class Gate(ThreadedServer):
    """Stands before a server. While it is shut, what comes does not arrive."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._server = url.split(":")
        self._is_open = threading.Event()
        self._is_open.set()
        self.open, self.shut = self._is_open.set, self._is_open.clear

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # one of the two has closed
            its_reader, its_writer = await asyncio.open_connection(*self._server)
            await asyncio.gather(self._pass_on(reader, its_writer), self._pass_on(its_reader, writer, waits=False))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, waits: bool = True) -> None:
        while piece := await reader.read(1 << 16):
            while waits and not self._is_open.is_set():
                await asyncio.sleep(0.01)
            writer.write(piece)
        writer.close()


@pytest.fixture(scope="module")
def gates(servers):
    require_haproxy()
    server = servers.get("toy")
    with Gate(server.http_url) as http, Gate(server.grpc_url) as grpc:
        yield {"http": http, "grpc": grpc}


@pytest.fixture(scope="module")
def door(gates, tmp_path_factory):
    """A door that passes on one request at a time."""
    folder = tmp_path_factory.mktemp("waited")
    settings = {"HPLM_AT_ONCE": 1, "HPLM_FEW_AT_ONCE": 0, "HPLM_DOOR_SOCKET": folder / "socket"}
    http, grpc = (f"127.0.0.1:{gates[name].port}" for name in ("http", "grpc"))
    with haproxy(folder, http, grpc, "toy", **settings) as door:
        yield door


@pytest.fixture(params=LIBRARIES)
def protocol(request):
    return request.param


def ask(stock, model, timeout=None, **more):
    """Returns the error or None."""
    try:
        stock.ask([WORDS[0]], "acme", model=model, timeout=timeout, **more)
    except InferenceServerException as error:
        return refusal(error.message(), error.status())
    return None


@pytest.mark.parametrize("model", MODELS)
def test_what_has_waited_past_its_deadline_is_refused_and_not_counted_in_time(server, door, gates, protocol, model):
    gate, stock = gates[protocol], StockAtDoor(door, protocol)
    assert ask(stock, model) is None
    before = published(server, "hplm_requests_total", outcome="on_time")
    with ThreadPoolExecutor(2) as clients:
        gate.shut()
        try:
            ahead = clients.submit(ask, StockAtDoor(door, protocol), model, TIME_ENOUGH_US)
            late = clients.submit(ask, StockAtDoor(door, protocol), model, SOON_US)
            eventually(lambda: door.waiting(protocol) == 1)
            past = time.monotonic() + SOON_US / 1e6  # a bound below: longer does no harm
            eventually(lambda: time.monotonic() > past)
        finally:
            gate.open()
        answers = {type(one.result(PATIENCE)) for one in (ahead, late)}
    assert answers == {type(None), DeadlineMissed}
    eventually(lambda: published(server, "hplm_requests_total", outcome="on_time") == before + 1)


@pytest.mark.parametrize("model", MODELS)
def test_a_client_of_the_door_cannot_say_when_its_request_arrived(door, protocol, model):
    for said in ("soon", "0", str(time.time_ns() // 1000 - 20_000_000)):
        assert ask(StockAtDoor(door, protocol), model, 10_000_000, headers={"hplm-arrived": said}) is None


@pytest.mark.parametrize("model", MODELS)
def test_a_client_of_the_server_can_only_shorten_its_own_time_and_metrics_tell_how_long_it_has_waited(server, protocol, model):
    stock, now_us = Stock(server, protocol), time.time_ns() // 1000
    before = {name: published(server, f"{BEFORE_LOOKUP}_{name}") for name in ("sum", "count")}
    for said, expected in (
        (now_us - 50_000_000, DeadlineMissed),
        (now_us + 20_000_000, type(None)),  # it would have the more time
        (1, type(None)),  # no clock of a door
    ):
        error = ask(stock, model, 15_000_000, headers={"hplm-arrived": str(said)})
        assert isinstance(error, expected), (said, error)
    assert "hplm-arrived" in str(ask(stock, model, headers={"hplm-arrived": "soon"}))
    assert ask(stock, model, headers={"hplm-arrived": str(now_us - 50_000_000)}) is None
    eventually(lambda: published(server, f"{BEFORE_LOOKUP}_count") > before["count"])
    eventually(lambda: published(server, f"{BEFORE_LOOKUP}_sum") > before["sum"] + 50)
