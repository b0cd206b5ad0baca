"""Large requests through the front door: the real HAProxy before a stand-in for Triton that answers when the test says so."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from tests.deploy.door import StockAtDoor, haproxy, require_haproxy
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

INFER = "/v2/models/toy/infer"
LARGE, AT_ONCE = 200_000, 2  # bytes, requests over each protocol
OF_ONE_ADDRESS = 2
SOURCES = [f"127.0.0.{number}" for number in range(2, 6)]


@pytest.fixture
def held():
    held = Held(larger_than=LARGE)
    yield held
    held.may_answer.set()


@pytest.fixture
def http_url(held):
    with http_stand_in(held) as url:
        yield url


@pytest.fixture
def grpc_url(held):
    with grpc_stand_in(held) as url:
        yield url


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
        assert all(answer.status == 503 and mentions(answer.error, "[queue_full]") for answer in refused)
        held.may_answer.set()
        assert sorted(one.result(PATIENCE).status for one in large) == [200] * AT_ONCE + [503] * len(refused)


def test_one_address_has_two_on_their_way(door, held):
    with ThreadPoolExecutor(OF_ONE_ADDRESS) as clients:
        large = [clients.submit(post, door, "a" * LARGE) for _ in range(OF_ONE_ADDRESS)]
        eventually(lambda: held.count == OF_ONE_ADDRESS)
        answer = post(door, "a" * LARGE)
        assert answer.status == 503 and mentions(answer.error, "[quota]") and "retry-after: 1\r\n" in answer.head
        assert post(door, "a").status == 200
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in large] == [200] * OF_ONE_ADDRESS


def test_the_same_holds_over_grpc(door, held):
    stocks = [StockAtDoor(door, "grpc") for _ in range(OF_ONE_ADDRESS + 1)]
    with ThreadPoolExecutor(OF_ONE_ADDRESS) as clients:
        large = [clients.submit(stock.ask, ["a" * LARGE], "acme", outputs=()) for stock in stocks[1:]]
        eventually(lambda: held.count == OF_ONE_ADDRESS)
        with pytest.raises(InferenceServerException, match="503"):
            stocks[0].ask(["a" * LARGE], "acme", outputs=())
        stocks[0].ask(["a"], "acme", outputs=())
        held.may_answer.set()
        for one in large:
            one.result(PATIENCE)
