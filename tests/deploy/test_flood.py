"""Limits of an address at the front door: the real HAProxy before stand-ins for Triton. Other addresses notice nothing."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from tritonclient.utils import InferenceServerException

from hplm_client.errors import QuotaExceeded, refusal
from tests.deploy.door import StockAtDoor, haproxy, require_haproxy
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

INFER = "/v2/models/toy/infer"
NOTHING = b"GET /v2/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = 1000  # bytes of a request that the stand-ins hold
OTHER = "127.0.0.2"
LONGEST_WAIT = 10  # seconds that a refusal names


@pytest.fixture(scope="module")
def held():
    return Held(larger_than=LARGE)


@pytest.fixture(scope="module")
def urls(held):
    require_haproxy()
    with http_stand_in(held) as http, grpc_stand_in(held) as grpc:
        yield http, grpc


@contextmanager
def opened(urls, folder, **limits):
    with haproxy(folder / "door", *urls, "toy", **limits) as door:
        eventually(lambda: post(door, source="127.0.0.9") == 200)
        yield door


def post(door, text="a", source="127.0.0.1"):
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return door.post(INFER, json.dumps({"inputs": [given]}).encode(), source).status


def ask(stock, text="a"):
    stock.ask([text], "acme", outputs=())


def error_of(stock):
    with pytest.raises(InferenceServerException) as caught:
        ask(stock)
    return refusal(caught.value.message(), caught.value.status())


def answers(door, times):
    """Returns the answers to requests on one connection, one after the other, until the door closes it."""
    received = []
    with door.connect() as connection, suppress(OSError):
        for _ in range(times):
            connection.sendall(NOTHING)
            answer = b""
            while not answer.endswith(b"}"):
                piece = connection.recv(1 << 16)
                if not piece:
                    return received
                answer += piece
            received.append(answer.decode().removeprefix("HTTP/1.1 "))
    return received


def test_one_address_has_so_many_requests_in_flight(urls, held, tmp_path):
    held.may_answer.clear()
    with opened(urls, tmp_path, HPLM_IN_FLIGHT=4) as door, ThreadPoolExecutor(4) as clients:
        stock = StockAtDoor(door, "grpc")
        waiting = [clients.submit(ask, stock, "a" * LARGE) for _ in range(4)]
        eventually(lambda: held.count == 4)
        error = error_of(StockAtDoor(door, "grpc"))
        assert isinstance(error, QuotaExceeded) and error.retry_after_s == 1
        assert post(door) == 503 and post(door, source=OTHER) == 200
        held.may_answer.set()
        for one in waiting:
            one.result(PATIENCE)
        eventually(lambda: post(door) == 200)


def test_a_refusal_says_when_to_come_again(urls, tmp_path):
    """As many are told the same second as may come in one, and nobody more than ten."""
    with opened(urls, tmp_path, HPLM_REQUESTS=20) as door:
        refused = [answer for answer in answers(door, 80) if answer.startswith("503")]
        assert len(refused) == 60
        waits = [int(re.search(r"retry-after: (\d+)", answer)[1]) for answer in refused]
        assert all(f"retry after {wait} s" in answer for wait, answer in zip(waits, refused, strict=True))
        assert waits == sorted(waits) and waits[:4] == [1, 2, 2, 3] and waits[-1] == LONGEST_WAIT
        error = error_of(StockAtDoor(door, "grpc"))
        assert isinstance(error, QuotaExceeded) and error.retry_after_s == LONGEST_WAIT
        assert door.post("/v1/completions").status == 429
        assert post(door, source=OTHER) == 200


def test_refused_requests_do_not_keep_others_of_their_address_out(urls, tmp_path):
    with opened(urls, tmp_path, HPLM_REQUESTS=20) as door:
        assert sum(answer.startswith("404") for answer in answers(door, 100)) == 20
        # More come than may. If they counted, none would ever be let in again.
        eventually(lambda: any(answer.startswith("404") for answer in answers(door, 5)))


def test_an_address_that_does_not_wait_is_cut_off(urls, tmp_path):
    with opened(urls, tmp_path, HPLM_REQUESTS=10, HPLM_REFUSED=50) as door:
        assert len(answers(door, 1000)) < 100
        with pytest.raises(OSError):
            door.connect()  # the handshake already
        assert post(door, source=OTHER) == 200
        assert door.log.read_text().count("127.0.0.1:") == 0, "it leaves no lines in the log"
        eventually(lambda: lets_in(door))


def test_one_address_makes_so_many_new_connections(urls, tmp_path):
    with opened(urls, tmp_path, HPLM_HANDSHAKES=10) as door:
        statuses = [lets_in(door) for _ in range(20)]
        assert statuses[0] and not statuses[-1]
        assert lets_in(door, OTHER)


def lets_in(door, source="127.0.0.1"):
    try:
        return door.send("GET", "/v2/nothing", source=source).status in (404, 503)
    except (OSError, AssertionError):  # no connection, or no answer on it
        return False
