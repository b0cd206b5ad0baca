"""The router's rules over HTTP and gRPC, before fakes: the real HAProxy with the file that `hplm route` writes."""

import http.client
import json
import random
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.cluster.router import EVERYWHERE, INFER, LIMITED, NAMES, SHARED
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

REPLICAS = {"replica-1", "replica-2", "replica-3"}
TEXT = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
LONG = 100_000
SERVICE = "/inference.GRPCInferenceService/ModelInfer"


def in_json(router, name):
    return router.post({"inputs": [TEXT], "parameters": {"tenant": name}})


def in_binary(router, name):
    data = struct.pack("<I", 1000) + b'"}' * 500
    given = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given], "parameters": {"tenant": name}}).encode()
    return router.post(head + data, inference_header_content_length=str(len(head)))


def in_generate(router, name):
    return router.post({"text_input": "a", "tenant": name}, "/v2/models/toy/generate")


def in_header(router, name):
    return router.post({"inputs": [TEXT]}, hplm_tenant=name)


def parameters(**given):
    kinds = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}
    return {name: service_pb2.InferParameter(**{kinds[type(value)]: value}) for name, value in given.items()}


def over_grpc(router, message, *metadata):
    """Sends the bytes as they are. Returns the status and the replica that has answered."""
    router.until_idle()
    with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
        call = channel.unary_unary(SERVICE, lambda sent: sent, service_pb2.ModelInferResponse.FromString)
        return 200, {"replica": call(message, timeout=60, metadata=metadata).model_name}


def message_of(text="a", **given):
    message = service_pb2.ModelInferRequest(
        model_name="toy", parameters=parameters(**given), raw_input_contents=[text.encode()]
    )
    return message.SerializeToString()


def in_metadata(router, name):
    return over_grpc(router, message_of(), ("hplm-tenant", name))


def in_message(**others):
    return lambda router, name: over_grpc(router, message_of(tenant=name, **others))


def streamed(router, *metadata, **given):
    """Sends each message of a stream after the answer to the one before."""
    message = service_pb2.ModelInferRequest(model_name="toy", parameters=parameters(**given))
    answered, used = threading.Semaphore(1), []
    router.until_idle()

    def messages():
        for _ in range(3):
            assert answered.acquire(timeout=60)
            yield message

    with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for answer in stub.ModelStreamInfer(messages(), timeout=60, metadata=metadata):
            used.append(answer.infer_response.model_name)
            answered.release()
    assert len(used) == 3 and len(set(used)) == 1
    return 200, {"replica": used[0]}


WAYS = {
    "json": in_json,
    "binary": in_binary,
    "generate": in_generate,
    "metadata": in_metadata,
    "message": in_message(),
    "message with others": in_message(a="tenant", hplm_priority=7, truncate=True, z="no", score=0.5),
    "message with odd ones": in_message(a="", hplm_rung=-1),
    "stream": lambda router, name: streamed(router, tenant=name),
    "stream with metadata": lambda router, name: streamed(router, ("hplm-tenant", name)),
}


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
def test_a_tenant_has_one_replica_however_it_is_named(router, replicas, ask):
    for name in (*NAMES[:10], LIMITED[0], LIMITED[1]):
        home = router.replica_of(name)
        router.until_idle()
        before = {one.name: one.tenants[name] for one in replicas}
        assert ask(router, name)[1]["replica"] == home
        assert {one.name: one.tenants[name] - before[one.name] for one in replicas} == {
            one.name: int(one.name == home) for one in replicas
        }, "the header is added, so that lookup can compare"


@pytest.mark.parametrize(("name", "homes"), [(SHARED, 2), (EVERYWHERE, 3)])
@pytest.mark.parametrize("ask", [in_header, in_message()])
def test_a_tenant_uses_exactly_its_homes(router, name, homes, ask):
    used: Counter[str] = Counter()
    for _ in range(60):
        router.until_idle()
        used[ask(router, name)[1]["replica"]] += 1
    assert len(used) == homes and min(used.values()) >= 60 / homes / 3


def test_tenants_and_homes_are_spread_over_all_replicas(router):
    homes = Counter(map(router.replica_of, NAMES))
    assert len(homes) == 3 and max(homes.values()) <= 1.3 * len(NAMES) / 3
    assert len(set(map(router.replica_of, LIMITED))) == 3


def all_at_once(router, replicas, names):
    """Sends requests that are all in flight together. Returns how many each replica got, and the answers."""
    before = [one.tenants.total() for one in replicas]
    for one in replicas:
        one.hold()
    with ThreadPoolExecutor(len(names)) as clients:
        asked = [clients.submit(in_header, router, name) for name in names]
        eventually(lambda: sum(one.tenants.total() for one in replicas) - sum(before) == len(names))
        for one in replicas:
            one.release()
        return [one.tenants.total() - was for one, was in zip(replicas, before, strict=True)], [one.result() for one in asked]


def test_the_busiest_replica_has_little_more_than_its_part_of_a_zipf(router, replicas):
    """Requests in flight overflow where one tenant has many."""
    drawn = random.Random(0).choices(NAMES, weights=[1 / rank for rank in range(1, len(NAMES) + 1)], k=90)
    got, answers = all_at_once(router, replicas, drawn)
    assert max(got) <= 1.3 * len(drawn) / 3 and {status for status, _ in answers} == {200}


def test_a_tenant_with_quotas_has_one_home_even_under_load(router, replicas):
    home = router.replica_of(LIMITED[0])
    _, answers = all_at_once(router, replicas, LIMITED[:1] * 20)
    assert {answer["replica"] for _, answer in answers} == {home}


def test_a_replica_that_has_the_only_request_in_flight_passes_the_next_one_on(router, replicas):
    """HAProxy counts whole requests: 1.25 times two requests, of three replicas, is one for each."""
    home = router.replica_of(NAMES[0])
    router.until_idle()
    (own,) = [one for one in replicas if one.name == home]
    before = own.tenants[NAMES[0]]
    own.hold()
    with ThreadPoolExecutor(1) as client:
        first = client.submit(in_header, router, NAMES[0])
        try:
            eventually(lambda: own.tenants[NAMES[0]] > before)
            assert in_header(router, NAMES[0])[1]["replica"] != home
        finally:
            own.release()
        assert first.result()[1]["replica"] == home


NOBODY = {
    **{f"json {name[:8]!r}": lambda router, name=name: in_json(router, name) for name in ("", "Loud", "a b", "-", "x" * 65)},
    **{
        f"message {given}": lambda router, given=given: over_grpc(router, message_of(**given))
        for given in (
            *({"tenant": name} for name in ("Not One", LIMITED[0] + "\n", LIMITED[0] + "\0x", 7)),
            {},
            {"other": LIMITED[0]},
        )
    },
}


@pytest.mark.parametrize("ask", NOBODY.values(), ids=map(str, range(len(NOBODY))))
def test_a_name_that_no_tenant_has_goes_to_all_in_turn(router, ask):
    assert {ask(router)[1]["replica"] for _ in range(9)} == REPLICAS


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"parameters":{"ten\\u0061nt":"limited-0"}}',
        b'{"parameters":{"tenant":"Limited-0"}}',
        b'{"parameters":{"tenant":"limited-0\\u0000x"}}',  # Triton would read limited-0
        b'{"parameters":{"tenant":"limited-0\\n"}}',
        b"{",
        b"",
        b"[" * 5000,
        b'{"parameters":{"tenant":["a"]}}',
        b'{"parameters":7}',
        b"\0\xff",
    ],
)
def test_a_server_is_told_that_no_tenant_was_seen(router, replicas, body):
    """So nobody spreads the requests of a tenant with quotas over all replicas by hiding its name."""
    before = sum(one.tenants["-"] for one in replicas)
    for headers in ({}, {"hplm_tenant": "Limited-0"}):
        assert router.post(body, **headers)[0] == 200
    assert sum(one.tenants["-"] for one in replicas) == before + 2


@pytest.mark.parametrize("message", [b"", b"\xff" * 100, b"\x22\xff\x01", b"\x22\x02\x0a\x7f", b"\x0b", b"\x25\x01"])
def test_bytes_that_are_no_message_are_passed_on(router, message):
    """A server says what is wrong with them."""
    with suppress(grpc.RpcError):
        over_grpc(router, message)
    assert router.states() == dict.fromkeys(REPLICAS, "UP")


def test_a_stream_without_a_tenant_is_refused(router, replicas):
    before = sum(one.tenants.total() for one in replicas)
    with pytest.raises(grpc.RpcError):
        streamed(router)
    assert sum(one.tenants.total() for one in replicas) == before


def test_a_large_request_must_show_its_tenant(router):
    """Clients of gRPC write the parameters before the texts."""
    text, name = {**TEXT, "data": ["a" * LONG]}, LIMITED[0]
    status, answer = router.post({"inputs": [text], "parameters": {"tenant": name}})
    assert status == 400 and "[invalid_input]" in answer["error"] and "hplm-tenant" in answer["error"]
    hidden = message_of("a" * LONG) + service_pb2.ModelInferRequest(parameters=parameters(tenant=name)).SerializeToString()
    with pytest.raises(grpc.RpcError):  # often without our words, because the client is still sending
        over_grpc(router, hidden)
    for status, answer in (
        router.post({"inputs": [text]}, hplm_tenant=name),
        router.post({"parameters": {"tenant": name}, "inputs": [text]}),  # its parameters come first
        over_grpc(router, message_of("a" * LONG, tenant=name)),
        over_grpc(router, hidden, ("hplm-tenant", name)),
    ):
        assert status == 200 and answer["replica"] == router.replica_of(name)


def test_two_headers_arrive_as_one(router, replicas):
    """Otherwise the router and lookup might each read another one of them."""
    before = [Counter(one.tenants) for one in replicas]
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=60)
    connection.putrequest("POST", INFER)
    for header in (("hplm-tenant", NAMES[0]), ("hplm-tenant", NAMES[1]), ("content-length", "2")):
        connection.putheader(*header)
    connection.endheaders(b"{}")
    assert connection.getresponse().status == 200
    got = sum((one.tenants - was for one, was in zip(replicas, before, strict=True)), Counter())
    assert got in (Counter([NAMES[0]]), Counter([NAMES[1]]))
