"""More requests at the front door than the server gets at a time: the real HAProxy before stand-ins for Triton."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm_client.errors import QueueFull, refusal
from tests.deploy.door import StockAtDoor, haproxy, require_haproxy, waiting
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

INFER = "/v2/models/toy/infer"
LARGE = 1000  # bytes of a request that the stand-ins hold
MEDIUM = 60_000  # bytes that do not fit into the door's buffer
MANY = 8  # requests of an address that are not refused
FLOOD, QUIET = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def held():
    held = Held(larger_than=LARGE)
    yield held
    held.may_answer.set()


@pytest.fixture
def door(held, tmp_path, request):
    require_haproxy()
    with http_stand_in(held) as http, grpc_stand_in(held) as grpc:
        settings = {"HPLM_AT_ONCE": request.param, "HPLM_FEW_AT_ONCE": 0, "HPLM_MEDIUM_AT_ONCE": 2, "HPLM_WAITING": 2}
        settings["HPLM_DOOR_SOCKET"] = tmp_path / "socket"
        with haproxy(tmp_path / "door", http, grpc, "toy", **settings) as door:
            eventually(lambda: post(door, 1).status == 200)
            yield door


def post(door, size, source="127.0.0.1"):
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a" * size]}
    return door.post(INFER, json.dumps({"inputs": [given]}).encode(), source)


def ask(door):
    StockAtDoor(door, "grpc").ask(["a" * LARGE], "acme", outputs=())


@pytest.fixture
def in_door(tmp_path):
    """Tells how many requests wait in the door."""
    return lambda protocol: waiting(tmp_path / "socket", protocol)


@pytest.mark.parametrize("door", [1], indirect=True)
def test_those_go_first_whose_address_has_few_in_flight(door, held, in_door):
    with ThreadPoolExecutor(5) as clients:
        asked = []
        for before in range(4):
            asked.append(clients.submit(post, door, LARGE, FLOOD))
            eventually(lambda: held.count == 1 and in_door("http") == before)  # noqa: B023
        asked.append(clients.submit(post, door, 2 * LARGE, QUIET))
        eventually(lambda: in_door("http") == 4)
        assert len(held.sizes) == 1
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in asked] == [200] * 5
    assert held.sizes[1] == max(held.sizes), "the last one came second"


@pytest.mark.parametrize("door", [2], indirect=True)
def test_when_many_wait_only_addresses_with_many_are_refused(door, held, in_door):
    with ThreadPoolExecutor(MANY + 3) as clients:
        asked = [clients.submit(post, door, LARGE, FLOOD) for _ in range(MANY)]
        eventually(lambda: held.count == 2 and in_door("http") == MANY - 2)
        refused = post(door, LARGE, FLOOD)
        assert refused.status == 503 and "retry-after: 1\r\n" in refused.head
        assert refusal(refused.error, 503).retry_after_s == 1
        asked.append(clients.submit(post, door, LARGE, QUIET))
        eventually(lambda: in_door("http") == MANY - 1)
        assert not any(one.done() for one in asked)
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in asked] == [200] * (MANY + 1)
        assert post(door, LARGE, FLOOD).status == 200


@pytest.mark.parametrize("door", [2], indirect=True)
def test_the_same_over_grpc(door, held, in_door):
    with ThreadPoolExecutor(MANY) as clients:
        asked = [clients.submit(ask, door) for _ in range(MANY)]
        eventually(lambda: held.count == 2 and in_door("grpc") == MANY - 2)
        with pytest.raises(InferenceServerException) as caught:
            ask(door)
        error = refusal(caught.value.message(), caught.value.status())
        assert isinstance(error, QueueFull) and error.retry_after_s == 1
        held.may_answer.set()
        for one in asked:
            one.result(PATIENCE)


@pytest.mark.parametrize("door", [1], indirect=True)
def test_requests_that_do_not_fit_into_the_buffer_take_no_place_of_small_ones(door, held):
    with ThreadPoolExecutor(4) as clients:
        medium = [clients.submit(post, door, MEDIUM, FLOOD) for _ in range(3)]
        eventually(lambda: held.count == 2)
        small = clients.submit(post, door, LARGE, FLOOD)
        eventually(lambda: held.count == 3)
        assert not any(one.done() for one in medium)
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in (*medium, small)] == [200] * 4


@pytest.mark.parametrize("door", [1], indirect=True)
def test_one_address_has_a_few_of_them_on_their_way(door, held):
    with ThreadPoolExecutor(17) as clients:
        asked = [clients.submit(post, door, MEDIUM, FLOOD) for _ in range(17)]
        eventually(lambda: any(one.done() for one in asked))
        held.may_answer.set()
        assert sorted(one.result(PATIENCE).status for one in asked) == [200] * 16 + [503]


@pytest.mark.parametrize("door", [1], indirect=True)
def test_who_has_waited_for_ten_seconds_is_refused(door, held):
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(post, door, LARGE, source) for source in (FLOOD, QUIET)]
        eventually(lambda: any(one.done() for one in asked))
        (refused,) = [one.result() for one in asked if one.done()]
        assert refused.status == 503 and refusal(refused.error, 503).retry_after_s == 1
        held.may_answer.set()
        assert sorted(one.result(PATIENCE).status for one in asked) == [200, 503]
