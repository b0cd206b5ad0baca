"""Tenants in turn at the front door: the real HAProxy before stand-ins for Triton, which hold requests."""

import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hplm_client.errors import QueueFull, refusal
from tests.deploy.door import command, haproxy, require_haproxy
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

INFER = "/v2/models/toy/infer"
LOUD, QUIET = "loud", "quiet"
HELD = 1000  # bytes of a request that the stand-ins hold
OF_ADDRESS, OF_TENANT = 8, 64  # requests in flight that nobody is refused for
FORGER, OTHER = "127.0.0.2", "127.0.0.200"


@pytest.fixture
def held():
    held = Held(larger_than=HELD)
    yield held
    held.may_answer.set()


@pytest.fixture
def opened(held, tmp_path):
    """Opens doors. `at_once`: requests that are passed on at a time; `few_at_once`: those beside them."""
    require_haproxy()

    @contextmanager
    def opened(at_once, waiting=2, few_at_once=0, late=1000):
        with http_stand_in(held) as http, grpc_stand_in(held) as grpc_url:
            settings = {
                "HPLM_AT_ONCE": at_once,
                "HPLM_FEW_AT_ONCE": few_at_once,
                "HPLM_WAITING": waiting,
                "HPLM_LATE": late,
                "HPLM_DOOR_SOCKET": tmp_path / "socket",
            }
            with haproxy(tmp_path / "door", http, grpc_url, "toy", **settings) as door:
                eventually(lambda: in_json(door, None, OTHER, 1).status == 200)
                yield door

    return opened


@pytest.fixture
def count(tmp_path):
    """Tells how many requests in flight the door counts for a key."""

    def count(key, table="tenants_in_flight"):
        found = re.findall(rf"key={key} .*conn_cur=(\d+)", command(tmp_path / "socket", f"show table {table}"))
        return int(found[0]) if found else 0

    return count


def in_json(door, tenant, source, size=HELD, **headers):
    parameters = {} if tenant is None else {"parameters": {"tenant": tenant}}
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a" * size]}
    return door.post(INFER, json.dumps({"inputs": [given], **parameters}).encode(), source, **headers)


def in_header(door, tenant, source, size=HELD):
    return in_json(door, None, source, size, hplm_tenant=tenant)


def in_json_before_binary_data(door, tenant, source, size=HELD):
    data = struct.pack("<I", size) + b'"}' * (size // 2)
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given], "parameters": {"tenant": tenant}}).encode()
    return door.post(INFER, head + data, source, inference_header_content_length=str(len(head)))


def over_grpc(door, tenant):
    """Returns the error or None. All of these come from one address."""
    message = service_pb2.ModelInferRequest(model_name="toy", raw_input_contents=[b"a" * HELD])
    credentials = grpc.ssl_channel_credentials(door.certificate.read_bytes())
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"localhost:{door.port}", credentials, options) as channel:
        try:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(message, timeout=PATIENCE, metadata=(("hplm-tenant", tenant),))
        except grpc.RpcError as error:
            return error
    return None


@pytest.mark.parametrize("ask", [in_json, in_header, in_json_before_binary_data])
def test_a_flood_from_many_addresses_keeps_no_other_tenant_waiting(opened, held, count, ask):
    with opened(at_once=1) as door, ThreadPoolExecutor(5) as clients:
        asked = []
        for number in range(4):
            asked.append(clients.submit(ask, door, LOUD, f"127.0.0.{2 + number}"))
            eventually(lambda: count(LOUD) == len(asked))
        asked.append(clients.submit(ask, door, QUIET, OTHER, 2 * HELD))
        eventually(lambda: count(QUIET) == 1)
        eventually(lambda: len(held.sizes) == 1)
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in asked] == [200] * 5
    assert held.sizes[1] == max(held.sizes), "the last one came second"


def test_over_grpc_metadata_names_the_tenant(opened, held, count):
    with opened(at_once=1) as door, ThreadPoolExecutor(5) as clients:
        asked = []
        for _ in range(4):
            asked.append(clients.submit(over_grpc, door, LOUD))
            eventually(lambda: count(LOUD) == len(asked))
        asked.append(clients.submit(over_grpc, door, QUIET))
        eventually(lambda: count(QUIET) == 1)
        held.may_answer.set()
        assert [one.result(PATIENCE) for one in asked] == [None] * 5


def test_when_many_wait_a_tenant_with_many_is_refused_and_no_other(opened, held, count):
    with opened(at_once=2) as door, ThreadPoolExecutor(OF_TENANT + 1) as clients:
        waiting = [clients.submit(in_header, door, LOUD, f"127.0.0.{2 + number // OF_ADDRESS}") for number in range(OF_TENANT)]
        eventually(lambda: count(LOUD) == OF_TENANT)
        for ask in (in_header, in_json, in_json_before_binary_data):
            refused = ask(door, LOUD, OTHER)
            error = refusal(refused.error, refused.status)
            assert isinstance(error, QueueFull) and error.retry_after_s == 1 and "tenant" in refused.error
        waiting.append(clients.submit(in_json, door, QUIET, OTHER))
        eventually(lambda: count(QUIET) == 1)
        assert not any(one.done() for one in waiting)
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in waiting] == [200] * (OF_TENANT + 1)
        eventually(lambda: count(LOUD) == 0)


def test_tenants_with_few_requests_have_places_of_their_own(opened, held, count):
    with opened(at_once=1, waiting=256, few_at_once=1) as door, ThreadPoolExecutor(OF_ADDRESS + 3) as clients:
        asked = []
        for number in range(OF_ADDRESS + 2):
            asked.append(clients.submit(in_json, door, LOUD, f"127.0.0.{2 + number // 2}"))
            eventually(lambda: count(LOUD) == len(asked))
        eventually(lambda: held.count == 2)
        held.answer_first()  # of a tenant that had few then
        eventually(lambda: count(LOUD) == OF_ADDRESS + 1)
        asked.append(clients.submit(in_json, door, LOUD, OTHER))
        eventually(lambda: count(LOUD) == OF_ADDRESS + 2)
        assert in_json(door, QUIET, OTHER, 1).status == 200, "answered before those that wait"
        assert held.count == 1 and sum(one.done() for one in asked) == 1
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in asked] == [200] * len(asked)


def error_of(door, tenant, number):
    return in_json(door, tenant, f"127.0.0.{2 + number}", 1).error


def error_over_grpc(door, tenant, number):
    return over_grpc(door, tenant).details()


@pytest.mark.parametrize("ask", [error_of, error_over_grpc])
def test_a_tenant_that_the_server_often_refuses_for_deadlines_is_refused_by_the_door_and_no_other(opened, held, ask):
    with opened(at_once=64, late=0) as door, ThreadPoolExecutor(OF_ADDRESS) as clients:
        held.may_answer.set()

        def errors(tenant):
            return list(clients.map(partial(ask, door, tenant), range(OF_ADDRESS)))

        held.refusal = "[deadline] it would take longer"
        eventually(lambda: any("[queue_full]" in error for error in errors(LOUD)))
        assert held.refusal in ask(door, QUIET, 0)
        held.refusal = "[quota] too many"
        for _ in range(4):
            assert all(held.refusal in error for error in errors("often"))


def test_of_one_address_only_a_few_requests_count_for_a_tenant(opened, held, count):
    """So whoever names another's tenant takes little from it."""
    forged = 30
    with opened(at_once=1, waiting=256) as door, ThreadPoolExecutor(forged + 1) as clients:
        asked = [clients.submit(in_header, door, QUIET, FORGER) for _ in range(OF_ADDRESS)]
        eventually(lambda: count(QUIET) == OF_ADDRESS)
        asked += [clients.submit(in_header, door, QUIET, FORGER) for _ in range(forged - OF_ADDRESS)]
        eventually(lambda: count(f".*{FORGER}", "more_of_address") == forged - OF_ADDRESS)
        assert count(QUIET) == OF_ADDRESS
        asked.append(clients.submit(in_header, door, QUIET, OTHER, 2 * HELD))
        eventually(lambda: count(QUIET) == OF_ADDRESS + 1)
        held.may_answer.set()
        assert [one.result(PATIENCE).status for one in asked] == [200] * (forged + 1)
    assert held.sizes.index(max(held.sizes)) <= OF_ADDRESS + 1, "only those that count, and one as early, come before"


def test_names_that_no_tenant_has_are_not_counted(opened, tmp_path):
    with opened(at_once=1) as door:
        for name in ("Loud", "a b", "-", "x" * 65, ""):
            assert in_header(door, name, OTHER, 1).status == 200 and in_json(door, name, OTHER, 1).status == 200
        for body in (b"[" * 5000, b'{"parameters":{"tenant":["a"]}}', b'{"parameters":"a"}'):
            assert door.post(INFER, body, OTHER).status in (200, 400)
        assert "key=" not in command(tmp_path / "socket", "show table tenants_in_flight")
        assert in_json(door, QUIET, OTHER, 1).status == 200
        assert "key=quiet" in command(tmp_path / "socket", "show table tenants_in_flight")
