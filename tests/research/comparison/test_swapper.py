"""The gateway of dedicated models: it keeps the budget, never unloads a model with requests, and serves all requests."""

from __future__ import annotations

import http.client
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from research.comparison.swapper import Residency, Swapper
from tests.loadtest.small_server import SmallServer, answer
from tests.support.message import mentions

pytestmark = pytest.mark.slow


class Memory:
    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.most = 0
        self.order: list[str] = []
        self.lock = threading.Lock()

    def load(self, name: str) -> None:
        with self.lock:
            assert name not in self.loaded
            self.loaded.add(name)
            self.most = max(self.most, len(self.loaded))
            self.order.append(f"+{name}")

    def unload(self, name: str) -> None:
        with self.lock:
            self.loaded.remove(name)
            self.order.append(f"-{name}")


def test_under_traffic_the_budget_holds_and_models_in_use_stay() -> None:
    memory = Memory()
    residency = Residency(3, memory.load, memory.unload)

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            name = f"model-{rng.randrange(8)}"
            with residency.use(name):
                assert name in memory.loaded
                assert name in memory.loaded

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert memory.most == 3 and residency.loads == sum(step[0] == "+" for step in memory.order)


def test_the_gateway_forwards_requests_when_their_model_is_loaded() -> None:
    def respond(number: int, body: bytes) -> bytes:
        return answer(body=b"answer to " + body) if body != b"{}" else answer()

    with SmallServer(respond) as triton, Swapper(f"127.0.0.1:{triton.port}", ("admin", "secret"), 1) as swapper:
        connection = http.client.HTTPConnection(swapper.url, timeout=10)
        for model, body in [("a", b"1"), ("a", b"2"), ("b", b"3")]:
            connection.request("POST", f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": "1"})
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"answer to " + body)
        connection.close()
    paths = [head.split()[1].decode() for head in triton.heads]
    assert [path for path in paths if "repository" in path] == [
        "/v2/repository/models/a/load", "/v2/repository/models/a/unload", "/v2/repository/models/b/load"
    ]  # fmt: skip
    assert all(b"admin: secret" in head.lower() for head in triton.heads if b"repository" in head)
    assert sum(b"inference-header-content-length: 1" in head.lower() for head in triton.heads) == 3


def test_a_model_that_cannot_be_loaded_is_503() -> None:
    with (
        SmallServer(lambda number, body: answer(status=400, body=b"unknown model")) as triton,
        Swapper(f"127.0.0.1:{triton.port}", ("admin", "secret"), 1) as swapper,
    ):
        connection = http.client.HTTPConnection(swapper.url, timeout=10)
        connection.request("POST", "/v2/models/a/infer", b"1")
        response = connection.getresponse()
        assert response.status == 503 and mentions(response.read().decode(), "'a'", "unknown model")
        connection.close()
