"""Large requests through the front door: the real HAProxy before a stand-in for Triton that answers when the test says so."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.deploy.door import StockAtDoor, haproxy, require_haproxy
from tests.naming import names
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.slow

INFER = "/v2/models/toy/infer"
LARGE, AT_ONCE = 200_000, 2  # bytes, requests over each protocol
OF_ONE_ADDRESS = 2
SOURCES = [f"127.0.0.{number}" for number in range(2, 6)]


class Held:
    """The large requests that the stand-in has and does not answer yet."""

    def __init__(self):
        self.count = 0
        self.may_answer = threading.Event()
        self.lock = threading.Lock()

    def take(self, size):
        if size > LARGE:
            self._change(1)
            self.may_answer.wait(PATIENCE)
            self._change(-1)

    def _change(self, by):
        with self.lock:
            self.count += by


@pytest.fixture
def held():
    held = Held()
    yield held
    held.may_answer.set()


@pytest.fixture
def http_url(held):
    class StandIn(BaseHTTPRequestHandler):
        def do_POST(self):
            held.take(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    held.may_answer.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def grpc_url(held):
    class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelInfer(self, request, context):
            held.take(request.ByteSize())
            return service_pb2.ModelInferResponse(model_name="toy")

    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(StandIn(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        held.may_answer.set()
        server.stop(None)


@pytest.fixture
def door(http_url, grpc_url, tmp_path):
    require_haproxy()
    settings = {"HPLM_LARGE": LARGE, "HPLM_LARGE_AT_ONCE": AT_ONCE}
    with haproxy(tmp_path / "door", http_url, grpc_url, "toy", **settings) as door:
        eventually(lambda: post(door, "a").status == 200)
        yield door


def post(door, text, source="127.0.0.1"):
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return door.post(INFER, json.dumps({"inputs": [given]}).encode(), source)


def test_few_reach_the_server_at_a_time_and_small_ones_pass_them(door, held):
    with ThreadPoolExecutor(len(SOURCES)) as clients:
        large = [clients.submit(post, door, "a" * LARGE, source) for source in SOURCES]
        eventually(lambda: held.count == AT_ONCE)
        assert [post(door, "a").status for _ in range(3)] == [200] * 3  # few: the others wait in line for ten seconds at most
        assert held.count == AT_ONCE and not any(one.done() for one in large)
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in large] == [200] * len(SOURCES)
    assert held.count == 0


def test_those_that_wait_too_long_are_refused(door, held):
    with ThreadPoolExecutor(len(SOURCES)) as clients:
        large = [clients.submit(post, door, "a" * LARGE, source) for source in SOURCES]
        eventually(lambda: sum(one.done() for one in large) == len(SOURCES) - AT_ONCE)
        refused = [one.result() for one in large if one.done()]
        assert all(answer.status == 503 and names(answer.error, "[queue_full]") for answer in refused)
        held.may_answer.set()
        assert sorted(one.result(PATIENCE).status for one in large) == [200] * AT_ONCE + [503] * len(refused)


def test_one_address_has_two_on_their_way(door, held):
    with ThreadPoolExecutor(OF_ONE_ADDRESS) as clients:
        large = [clients.submit(post, door, "a" * LARGE) for _ in range(OF_ONE_ADDRESS)]
        eventually(lambda: held.count == OF_ONE_ADDRESS)
        answer = post(door, "a" * LARGE)
        assert answer.status == 429 and names(answer.error, "[quota]")
        assert post(door, "a").status == 200
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in large] == [200] * OF_ONE_ADDRESS


def test_the_same_holds_over_grpc(door, held):
    stocks = [StockAtDoor(door, "grpc") for _ in range(OF_ONE_ADDRESS + 1)]
    with ThreadPoolExecutor(OF_ONE_ADDRESS) as clients:
        large = [clients.submit(stock.ask, ["a" * LARGE], "acme", outputs=()) for stock in stocks[1:]]
        eventually(lambda: held.count == OF_ONE_ADDRESS)
        with pytest.raises(InferenceServerException, match="429"):
            stocks[0].ask(["a" * LARGE], "acme", outputs=())
        stocks[0].ask(["a"], "acme", outputs=())
        held.may_answer.set()
        for one in large:
            one.result(PATIENCE)
