"""While a server stops, a client meets its answer, `[draining]` or a closed connection, and nothing else."""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from hplm.server import TritonServer, process_group
from hplm.server.stubs import stubs
from testing.toy import WORDS
from tests.backbones import NAMES, WHOLE, emit_two, make_two
from tests.server.stock import Stock
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    repository, _ = make_two(folder)
    return emit_two(repository, folder / "groups", WHOLE)


def outcome(stock: Stock, backbone: str = "toy") -> str:
    try:
        stock.ask([" ".join(WORDS[:9])] * 4, "acme", outputs=("LABEL",), model=backbone)
        return "answered"
    except InferenceServerException as error:
        if "[draining]" in error.message() and error.status() in ("503", "StatusCode.UNAVAILABLE"):
            return "draining"
        closed = error.status() == "StatusCode.UNAVAILABLE" and "[" not in error.message()  # gRPC's word for it
        return "closed" if closed else f"{error.status()} {error.message()}"
    except (OSError, http.client.HTTPException):
        return "closed"


def met_while_it_stops(repository: Path, protocol: str, backbones: Sequence[str]) -> dict[str, Counter[str]]:
    """Returns what clients of these backbones meet, each by itself, until the server has stopped."""
    server = TritonServer(repository).start()
    met = {backbone: Counter[str]() for backbone in backbones}
    ending = threading.Event()

    def ask_on(backbone: str) -> None:
        stock, own = Stock(server, protocol), met[backbone]
        while not ending.is_set() and own["closed"] < 100:
            own[outcome(stock, backbone)] += 1

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_on, backbones[number % len(backbones)]) for number in range(8)]
        try:
            eventually(lambda: all(own["answered"] > 20 for own in met.values()))
        finally:
            try:
                server.stop()
            finally:
                ending.set()
        for one in asking:
            one.result(timeout=60)
    return met


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_meet_no_other_error_while_the_server_stops(toy, protocol):
    met = met_while_it_stops(toy.repository, protocol, ["toy"])["toy"]
    assert set(met) <= {"answered", "draining", "closed"}, met
    assert met["draining"] > 0


def test_clients_of_both_backbones_of_a_group_meet_no_other_error(group):
    met = met_while_it_stops(group, "http", NAMES)
    assert all(set(own) <= {"answered", "draining", "closed"} for own in met.values()), met
    assert sum(own["draining"] for own in met.values()) > 0


def test_a_dead_model_and_an_idle_connection_do_not_lengthen_the_stop(toy):
    server = TritonServer(toy.repository).start()
    idle = http.client.HTTPConnection(server.http_url, timeout=60)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    group = server.pid
    os.kill(next(stub.pid for stub in stubs(group) if stub.model == "toy-lookup"), signal.SIGKILL)
    began = time.monotonic()
    server.stop(drain=5.0)
    assert time.monotonic() - began < 30  # Triton itself waits for its exit timeout, and then longer
    assert process_group.members(group) == []
    idle.close()


def test_hplm_drain_makes_the_server_refuse_until_it_is_started_again(toy):
    with TritonServer(toy.repository) as server:
        stock = Stock(server, "http")
        assert outcome(stock) == "answered"
        command = [sys.executable, "-m", "hplm.cli.main", "drain", "--at-least", "0"]
        environment = {**os.environ, "HPLM_SERVER_ID": server.id}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "") and "all requests are answered" in done.stdout
        assert outcome(stock) == "draining"
        server.start_again()
        assert outcome(Stock(server, "http")) == "answered"
