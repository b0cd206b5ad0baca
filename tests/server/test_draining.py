"""While a server stops, a client meets its answer, `[draining]` or a closed connection, and nothing else."""

import http.client
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from hplm.server import TritonServer
from testing.toy import WORDS
from tests.backbones import NAMES, WHOLE, emit_two, make_two
from tests.server.stock import Stock
from tests.support.wait import PATIENCE, eventually

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


def test_clients_meet_no_other_error_while_the_server_stops(group):
    """Of both backbones and over both protocols, each by itself."""
    server = TritonServer(group).start()
    ways = [(backbone, protocol) for backbone in NAMES for protocol in ("http", "grpc")]
    met = {way: Counter[str]() for way in ways}
    ending = threading.Event()

    def ask_on(backbone: str, protocol: str) -> None:
        stock, own = Stock(server, protocol), met[backbone, protocol]
        while not ending.is_set() and own["closed"] < 100:
            own[outcome(stock, backbone)] += 1

    with ThreadPoolExecutor(2 * len(ways)) as pool:
        asking = [pool.submit(ask_on, *way) for way in ways * 2]
        try:
            eventually(lambda: all(own["answered"] > 20 for own in met.values()))
        finally:
            try:
                server.stop()
            finally:
                ending.set()
        for one in asking:
            one.result(timeout=PATIENCE)
    assert all(set(own) <= {"answered", "draining", "closed"} for own in met.values()), met
    assert all(sum(met[way]["draining"] for way in ways if way[1] == protocol) for protocol in ("http", "grpc")), met
