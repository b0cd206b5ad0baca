"""While a server stops, a client meets its answer, `[draining]` or a closed connection, and nothing else."""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm.server import TritonServer, process_group
from hplm.server.stubs import stubs
from testing.toy import WORDS
from tests.server.stock import Stock

pytestmark = pytest.mark.slow


def outcome(stock: Stock) -> str:
    try:
        stock.ask([" ".join(WORDS[:9])] * 4, "acme", outputs=("LABEL",))
        return "answered"
    except InferenceServerException as error:
        if "[draining]" in error.message() and error.status() in ("503", "StatusCode.UNAVAILABLE"):
            return "draining"
        closed = error.status() == "StatusCode.UNAVAILABLE" and "[" not in error.message()  # gRPC's word for it
        return "closed" if closed else f"{error.status()} {error.message()}"
    except (OSError, http.client.HTTPException):
        return "closed"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_meet_no_other_error_while_the_server_stops(toy, protocol):
    server = TritonServer(toy.repository).start()
    met: Counter[str] = Counter()
    ending = threading.Event()

    def ask_on() -> None:
        stock = Stock(server, protocol)
        while not ending.is_set() and met["closed"] < 100:
            met[outcome(stock)] += 1

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_on) for _ in range(8)]
        time.sleep(2)
        server.stop()
        ending.set()
        for one in asking:
            one.result(timeout=60)
    assert set(met) <= {"answered", "draining", "closed"}, met
    assert met["answered"] > 0 and met["draining"] > 0


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
