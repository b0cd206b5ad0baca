"""gRPC through the router, on the same port as HTTP: from metadata or from the message itself."""

import threading
from contextlib import suppress

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from hplm_client.errors import Draining, refusal
from tests.cluster.router import require_haproxy, routing, stand_ins, tenant

pytestmark = pytest.mark.slow

NAMES = [f"tenant-{number}" for number in range(30)]
LIMITED, SHARED = "limited", "shared"
TENANTS = [*map(tenant, NAMES), tenant(LIMITED, rate=5.0), tenant(SHARED, rate=5.0, homes=2)]
LONG = 100_000
METHOD = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def replicas():
    require_haproxy()
    with stand_ins(3) as found:
        yield found


@pytest.fixture(scope="module")
def router(replicas, tmp_path_factory):
    with routing(tmp_path_factory.mktemp("router"), replicas, TENANTS) as router:
        yield router


@pytest.fixture(scope="module")
def client(router):
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{router.port}") as client:
        yield client


@pytest.fixture
def asked(router, client):
    """Sends a request. Returns the replica that has answered."""

    def asked(size=1, headers=None, **parameters):
        tensor = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([["a" * size]], dtype=object))
        router.until_idle()
        return client.infer("toy", [tensor], parameters=parameters, headers=headers).get_response().model_name

    return asked


def test_metadata_name_the_tenant_as_over_http(router, asked):
    for name in (*NAMES, LIMITED):
        assert asked(headers={"hplm-tenant": name}) == router.replica_of(name)


@pytest.mark.parametrize(
    "others", [{}, {"hplm_priority": 7}, {"a": "tenant", "truncate": True, "z": "no", "score": 0.5}, {"a": "", "hplm_rung": -1}]
)
def test_without_metadata_the_message_names_the_tenant(asked, replicas, others):
    for name in (*NAMES[:10], LIMITED):
        home = asked(headers={"hplm-tenant": name})
        before = sum(one.tenants[name] for one in replicas)
        assert asked(tenant=name, **others) == home
        assert sum(one.tenants[name] for one in replicas) == before + 1, "the metadata are added"


def test_a_tenant_uses_exactly_its_homes(asked):
    assert len({asked(tenant=SHARED) for _ in range(30)}) == 2


def test_without_a_tenant_a_server_answers(asked):
    names = ("Not One", LIMITED + "\n", LIMITED + "\0x", 7)
    for parameters in ({}, *({"tenant": name} for name in names), {"other": "limited"}):
        assert {asked(**parameters) for _ in range(9)} == {"replica-1", "replica-2", "replica-3"}


def test_a_large_message_must_show_its_tenant(router, asked):
    """Clients write the parameters before the texts."""
    assert asked(LONG, tenant=NAMES[0]) == asked(tenant=NAMES[0])
    text = service_pb2.ModelInferRequest(raw_input_contents=[b"a" * LONG]).SerializeToString()
    parameters = {"tenant": service_pb2.InferParameter(string_param=NAMES[0])}
    message = text + service_pb2.ModelInferRequest(parameters=parameters).SerializeToString()
    with pytest.raises(grpc.RpcError):  # often without our words, because the client is still sending
        sent(router, message, [])
    assert sent(router, message, [("hplm-tenant", NAMES[0])]) == asked(tenant=NAMES[0])


@pytest.mark.parametrize("message", [b"", b"\xff" * 100, b"\x22\xff\x01", b"\x22\x02\x0a\x7f", b"\x0b", b"\x25\x01"])
def test_bytes_that_are_no_message_are_passed_on(router, message):
    """A server says what is wrong with them."""
    with suppress(grpc.RpcError):
        sent(router, message, [])
    assert router.states() == dict.fromkeys(("replica-1", "replica-2", "replica-3"), "UP")


def sent(router, message, metadata):
    """Sends the bytes as they are. Returns the replica that has answered."""
    router.until_idle()
    with grpc.insecure_channel(f"127.0.0.1:{router.port}") as channel:
        call = channel.unary_unary(METHOD, lambda sent: sent, service_pb2.ModelInferResponse.FromString)
        return call(message, timeout=60, metadata=metadata).model_name


def streamed(router, metadata=(), **parameters):
    """Sends each message of a stream after the answer to the one before. Returns the replicas that answer."""
    given = {name: service_pb2.InferParameter(string_param=value) for name, value in parameters.items()}
    message = service_pb2.ModelInferRequest(model_name="toy", parameters=given)
    answered = threading.Semaphore(1)
    used = []
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
    assert len(used) == 3
    return set(used)


@pytest.mark.parametrize("name", [NAMES[0], LIMITED])
def test_a_stream_goes_to_its_tenants_replica(router, asked, replicas, name):
    home = {asked(tenant=name)}
    assert streamed(router, [("hplm-tenant", name)]) == home
    before = sum(one.tenants[name] for one in replicas)
    assert streamed(router, tenant=name) == home, "its first message names the tenant"
    assert sum(one.tenants[name] for one in replicas) == before + 1, "the metadata are added, for lookup to compare"


def test_a_stream_without_a_tenant_is_refused(router, replicas):
    before = sum(one.tenants.total() for one in replicas)
    with pytest.raises(grpc.RpcError):
        streamed(router)
    assert sum(one.tenants.total() for one in replicas) == before


def test_without_a_replica_the_answer_tells_to_come_again(router, asked, replicas):
    for one in replicas:
        one.drains = True
    try:
        router.until_up(but=("replica-1", "replica-2", "replica-3"))
        for name in (NAMES[0], LIMITED):
            with pytest.raises(InferenceServerException) as caught:
                asked(tenant=name)
            assert isinstance(refusal(caught.value.message(), caught.value.status()), Draining)
    finally:
        for one in replicas:
            one.drains = False
        router.until_up()
