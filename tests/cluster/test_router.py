"""The router's rules over HTTP and gRPC, before fakes: the real HAProxy with the file that `hplm route` writes."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.cluster.front import INFER, message_of
from tests.cluster.router import BIG, NAMES
from tests.support.message import mentions
from tests.support.wait import PATIENCE

pytestmark = pytest.mark.slow

REPLICAS = {"replica-1", "replica-2", "replica-3"}
LONG = 100_000


def by(way):
    return lambda front, name: front.ask(name, way=way).replica


def in_message(**others):
    """Names the tenant in a message of gRPC, beside other parameters."""
    return lambda front, name: front.call(message_of(b"a", tenant=name, **others)).replica


def streamed(router, *metadata, **given):
    """Sends each message of a stream after the answer to the one before. Returns the replica of all."""
    answered, used = threading.Semaphore(1), []

    def messages():
        for _ in range(3):
            assert answered.acquire(timeout=PATIENCE)
            yield message_of(b"a", **given)

    with router.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for answer in stub.ModelStreamInfer(messages(), timeout=PATIENCE, metadata=metadata):
            used.append(answer.infer_response.model_name)
            answered.release()
    assert len(used) == 3
    (replica,) = set(used)
    return replica


WAYS = {
    **{way: by(way) for way in ("json", "binary", "generate", "metadata", "message")},
    "message with others": in_message(a="tenant", hplm_priority=7, truncate=True, z="no", score=0.5),
    "message with odd ones": in_message(a="", hplm_rung=-1),
    "stream": lambda router, name: streamed(router, tenant=name),
    "stream with metadata": lambda router, name: streamed(router, ("hplm-tenant", name)),
}


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
def test_a_tenant_has_one_replica_however_it_is_named(router, replicas, ask):
    for name in NAMES[:10]:
        home = router.replica_of(name)
        before = {one.name: one.tenants[name] for one in replicas}
        assert ask(router, name) == home
        assert {one.name: one.tenants[name] - before[one.name] for one in replicas} == {
            one.name: int(one.name == home) for one in replicas
        }, "the header is added, so that lookup can compare"


def test_a_tenant_keeps_its_replica_under_load_so_that_its_limits_count_there_and_one_that_is_spread_goes_to_all(
    router, replicas
):
    for name in (NAMES[0], BIG):
        before = {one.name: one.tenants[name] for one in replicas}
        with ThreadPoolExecutor(20) as clients:
            used = Counter(one.replica for one in clients.map(partial(router.ask, way="header"), [name] * 60))
        assert used.total() == 60 and used == Counter({one.name: one.tenants[name] - before[one.name] for one in replicas})
        assert (used.keys() == REPLICAS) == (name == BIG), (name, used)


NOBODY = "", "Loud", "a b", "-", "x" * 65, "Tenant-0", "tenant-0\n"
NAMED = [{}, {"other": "tenant-0"}, *({"tenant": name} for name in NOBODY)]
HIDDEN = [
    *(json.dumps({"parameters": parameters}).encode() for parameters in (*NAMED, {"tenant": ["a"]}, 7)),
    b"{}",
    b'{"parameters":{"ten\\u0061nt":"tenant-0"}}',
    b'{"parameters":{"tenant":"tenant-0\\u0000x"}}',  # Triton would read tenant-0
    b"{",
    b"",
    b"[" * 5000,
    b"\0\xff",
]
MESSAGES = [message_of(**parameters) for parameters in (*NAMED, {"tenant": "tenant-0\0x"}, {"tenant": 7})]


def test_a_server_is_told_that_no_tenant_was_seen_and_all_get_such_requests_in_turn(router, replicas):
    """So nobody spreads the requests of a tenant with quotas over all replicas by hiding its name."""
    asks = [partial(router.post, INFER, body, **named) for body in HIDDEN for named in ({}, {"hplm_tenant": "Tenant-0"})]
    asks += [partial(router.call, message) for message in MESSAGES]
    used = Counter[str]()
    for ask in asks:
        before = sum(one.tenants["-"] for one in replicas)
        used[ask().replica] += 1
        assert sum(one.tenants["-"] for one in replicas) == before + 1, ask
    assert used.keys() == REPLICAS, used


def test_bytes_that_are_no_message_are_passed_on(router):
    """A server says what is wrong with them."""
    for message in (b"", b"\xff" * 100, b"\x22\xff\x01", b"\x22\x02\x0a\x7f", b"\x0b", b"\x25\x01"):
        router.call(message)
        assert router.states() == dict.fromkeys(REPLICAS, "UP"), message


def test_a_stream_without_a_tenant_is_refused(router, replicas):
    before = sum(one.tenants.total() for one in replicas)
    with pytest.raises(grpc.RpcError):
        streamed(router)
    assert sum(one.tenants.total() for one in replicas) == before


def test_a_large_request_must_show_its_tenant(router):
    """Clients of gRPC write the parameters before the texts."""
    name, text = NAMES[0], {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a" * LONG]}
    texts, parameters = ({"inputs": [text]}, {"parameters": {"tenant": name}})
    answer = router.post(INFER, json.dumps(texts | parameters).encode())
    assert answer.status == 400 and mentions(answer.error, "[invalid_input]", "hplm-tenant")
    hidden = message_of(b"a" * LONG).SerializeToString() + message_of(tenant=name).SerializeToString()
    assert router.call(hidden).refused, "often without our words, because the client is still sending"
    for answer in (
        router.ask(name, size=LONG, way="header"),
        router.post(INFER, json.dumps(parameters | texts).encode()),  # its parameters come first
        router.ask(name, size=LONG, way="message"),
        router.call(hidden, ("hplm-tenant", name)),
    ):
        assert answer.replica == router.replica_of(name)


def test_two_headers_arrive_as_one(router, replicas):
    """Otherwise the router and lookup might each read another one of them."""
    before = sum((one.tenants for one in replicas), Counter())
    assert router.post(INFER, b"{}", hplm_tenant=f"{NAMES[0]}\r\nhplm-tenant: {NAMES[1]}").status == 200
    got = sum((one.tenants for one in replicas), Counter()) - before
    assert got in (Counter([NAMES[0]]), Counter([NAMES[1]]))
