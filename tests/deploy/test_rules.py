"""The front door refuses requests that end or stall a server. A real HAProxy stands before a fake that would answer."""

import gzip
import json
import os
import subprocess
from functools import partial
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from hplm.server.process import program
from hplm_openai.endpoints import ENDPOINTS
from tests.cluster.front import CLOSED, GENERATE, INFER, SERVICE, message_of, read_answer
from tests.deploy.door import require_haproxy
from tests.deploy.image import DEPLOY
from tests.server.stock import body_of
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

LONGEST_REQUEST = 16 * 1024 * 1024
COMPLETIONS = "/v1/completions"
WITH_GATEWAY = {"HPLM_OPENAI": CLOSED}


@pytest.fixture
def door(opened):
    return opened()


def refused(answer, status, *words):
    assert answer.status == status, answer
    assert mentions(answer.error, "[invalid_input]", *words), answer


CLASSES = {"outputs": [{"name": "LABEL", "parameters": {"classification": 1}}]}
SHARED = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"shared_memory_region": "any"}}
SIZE = "inference_header_content_length"
SHAPES = [[1 << 42], [1 << 42, 1], [65535, 65535], [-1, 1], [1e5, 1], [1.5], [*range(1, 10), 1 << 31], [9999] * 12, [10**30, 1]]
BODIES = {
    **{f"shape {shape}": lambda shape=shape: (400, ["shape"], body_of(text={"shape": shape})) for shape in SHAPES},
    # After the server has seen the beginning.
    **{f"late shape {shape}": lambda own=shape: (400, [], b" " * 200_000 + body_of(text={"shape": own})) for shape in SHAPES},
    "deep arrays": lambda: (400, ["JSON"], b"[" * 100_000),
    "nine levels": lambda: (400, ["JSON"], b"[" * 9),
    "deep objects": lambda: (400, ["JSON"], b'{"id":' * 100_000),
    "deep at the end": lambda: (400, ["JSON"], body_of(["a" * 300_000])[:-1] + b',"id":' + b"[" * 100_000),
    "many values": lambda: (400, ["JSON"], body_of([""] * 1_000_000, {"shape": [1024, 1]})),
    "a long id": lambda: (400, [], body_of(id="i" * 2000)),
    "a very long id": lambda: (400, [], body_of(id="i" * 500_000)),
    "a long key": lambda: (400, [], body_of(parameters={"t" * 200: 1})),
    "a key": lambda: (400, ["'classification'"], body_of(**CLASSES)),
    "a key with an escape": lambda: (400, [], body_of(**CLASSES).replace(b"classification", b"class\\u0069fication")),
    "a key after a long text": lambda: (400, ["'classification'"], body_of(["b" * 500_000], **CLASSES)),
    "a key with a control character": lambda: (400, [], body_of().replace(b'"tenant"', rb'"tenant\n"')),
    "shared memory": lambda: (400, ["'shared_memory_region'"], body_of(inputs=[SHARED])),
    "more than 16 MB": lambda: (413, [16], body_of(["a" * LONGEST_REQUEST])),
    "long headers": lambda: (431, ["8 KB"], body_of(), {"authorization": "Bearer " + "a" * 10_000}),
    "a bomb": lambda: (415, [], gzip.compress(body_of(["a" * 20_000_000]), 1), {"content_encoding": "gzip"}),
    "no compression": lambda: (415, [], body_of(), {"content_encoding": "identity"}),
    **{size: lambda size=size: (400, [], body_of(), {SIZE: size}) for size in ("0", "-1", "99999999999", "1e3", "x", "5, 6")},
}


@pytest.mark.parametrize("given", BODIES.values(), ids=BODIES)
def test_bodies_are_refused(door, given):
    status, words, body, *headers = given()
    refused(door.post(INFER, body, **(headers[0] if headers else {})), status, *words)


def test_chunks_and_bodies_without_a_length_are_refused(door):
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body_of(["a" * 600_000])) + b"0\r\n\r\n"
    refused(door.send("POST", INFER, chunks, transfer_encoding="chunked"), 411)
    both = door.send("POST", INFER, b"0\r\n\r\n", transfer_encoding="chunked", content_length="5")
    assert both.status in (400, 411)
    refused(door.send("POST", INFER), 411)
    for length in (3 << 30, (1 << 32) + 1):
        refused(door.send("POST", INFER, content_length=str(length)), 413)


CLASSES_OF_LABEL, REGION = service_pb2.ModelInferRequest(), service_pb2.ModelInferRequest()
CLASSES_OF_LABEL.outputs.add(name="LABEL").parameters["classification"].int64_param = 1
REGION.inputs.add(name="TEXT_PAIR").parameters["shared_memory_region"].string_param = "any"
GOOD, LARGE = (message_of(b"a" * size, tenant="acme").SerializeToString() for size in (1, 200_000))
# Fields may come in any order, and more than once.
MESSAGES = {
    **{f"shape {shape}": (["shape"], message_of(b"a", shape=shape)) for shape in ([1 << 42, 1], [-1, 1], [9999] * 12)},
    "an unpacked shape": ([], GOOD + b"\x2a\x0b\x18\x80\x80\x80\x80\x80\x80\x80\x80\x40"),
    "a model": (["model"], message_of(b"a", model="toy-lookup")),
    "a model at the end": (["model"], GOOD + message_of(b"a", model="toy-upper").SerializeToString()),
    "classes": (["'classification'"], GOOD + CLASSES_OF_LABEL.SerializeToString()),
    "classes at the end": (["'classification'"], LARGE + CLASSES_OF_LABEL.SerializeToString()),
    "shared memory": (["'shared_memory_region'"], GOOD + REGION.SerializeToString()),
    "shared memory at the end": (["'shared_memory_region'"], LARGE + REGION.SerializeToString()),
    "no protobuf": ([], b"\xff" * 100),
    "long and no protobuf": (["protobuf"], b"\x2b" * 100_000),
    "more than 16 MB": ([LONGEST_REQUEST], message_of(b"a" * LONGEST_REQUEST, tenant="acme").SerializeToString()),
}


def refused_over_grpc(door, message, *words, method="ModelInfer"):
    answer = door.call(message, method=method)
    is_long = isinstance(message, bytes) and len(message) > 1 << 16
    if not is_long or answer.status not in ("StatusCode.CANCELLED", "StatusCode.UNAVAILABLE"):  # before all of it was sent
        refused(answer, "StatusCode.INVALID_ARGUMENT", *words)


@pytest.mark.parametrize("words, message", MESSAGES.values(), ids=MESSAGES)
def test_messages_of_grpc_are_refused(door, held, words, message):
    for method in ("ModelInfer", "ModelStreamInfer"):
        assert door.call(GOOD, method=method).refused is None
        before = held.tenants.total()
        refused_over_grpc(door, message, *words, method=method)
        assert held.tenants.total() == before


def test_a_stream_of_several_requests_reaches_no_server(door, held):
    before = held.tenants.total()
    with door.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(SERVICE + "ModelStreamInfer", bytes, bytes)(iter([GOOD] * 2), timeout=PATIENCE))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "one message" in caught.value.details()
    assert held.tenants.total() == before


@pytest.mark.parametrize(
    "name", [r"acme\u0000zzz", r"acme\u001b", r"acme\u007f", r"acme\n", r"\\acme\\\t"]
)  # as JSON writes them
def test_a_tenant_with_a_control_character_is_refused(door, name):
    """Triton ends a parameter at a NUL, so that it would be answered as another tenant."""
    refused(door.post(INFER, body_of().replace(b'"acme"', f'"{name}"'.encode())), 400, "control character")
    for more in ({}, {SIZE: "2"}):
        refused(door.post(GENERATE, f'{{"TEXT": "a", "tenant": "{name}"}}'.encode(), **more), 400)
    refused_over_grpc(door, message_of(b"a", tenant=json.loads(f'"{name}"')), "control character")


def test_a_body_is_read_alike_in_pieces(tmp_path):
    require_haproxy()
    script = Path(__file__).with_name("in_pieces.lua")
    (tmp_path / "haproxy.cfg").write_text(f"global\n    lua-load {script}\nfrontend one\n    bind 127.0.0.1:1\n")
    environment = {**os.environ, "HPLM_DOOR_LUA": str(DEPLOY / "haproxy/door.lua")}
    command = [program("haproxy", "haproxy"), "-c", "-f", "haproxy.cfg"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


PATHS = {
    ("GET", "POST"): (
        "/ /metrics /v2 /v2/models/toy /v2/models/toy/config /v2/models/toy/stats /v2/models/toy/ready /v2/models/stats "
        "/v2/repository/index /v2/repository/models/toy-upper/load /v2/logging /v2/trace/setting /v2/systemsharedmemory/status "
        "/v2/systemsharedmemory/region/any/register /v2/cudasharedmemory/status /v2/models/toy-lookup/infer "
        "/v2/models/toy-upper/infer /v2/models/nobody/infer /v2/models/toy/infer/ "
        "/v2//models/toy/infer /v2/models/toy-lookup/../toy/infer /v2/models/%74oy/infer /v2/models/toy/trace/setting "
        "/v2/models/toy-upper/versions/1/infer /v2/models/toy/versions/x/infer /v1/audio /v1 "
        "/v1/completions/ /health /v1//completions /models /classify/ /v1/score"
    ),
    ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"): INFER,
    ("GET",): f"{COMPLETIONS} /v1/embeddings /models/plain",
    ("POST",): "/v1/models /v1/models/plain",
}


def test_other_paths_and_methods_are_not_there(opened):
    door = opened(**WITH_GATEWAY)
    for methods, paths in PATHS.items():
        for method, path in ((method, path) for method in methods for path in paths.split()):
            answer = door.send(method, path, content_length="0", hplm_admin="the secret")
            assert answer.status == 404 and mentions(answer.error, "[invalid_input]"), (method, path, answer)


def test_other_methods_of_grpc_are_not_there(door):
    methods = (
        "RepositoryIndex RepositoryModelLoad SystemSharedMemoryRegister CudaSharedMemoryStatus TraceSetting "
        "LogSettings ModelConfig ModelStatistics ModelMetadata ServerMetadata"
    )
    for method in methods.split():
        assert door.call(b"", method=method).status == "StatusCode.UNIMPLEMENTED", method


def test_only_the_headers_that_it_needs_reach_a_server(door, held):
    headers = {"hplm_admin": "the secret", "accept_encoding": "gzip", "authorization": "Bearer a", "x_other": "1"}
    assert door.ask("acme", way="header", **headers).status == 200
    passed = {name.lower() for name in held.headers[-1]}
    assert {"authorization", "hplm-tenant", "hplm-arrived"} <= passed
    assert not passed & {"hplm-admin", "accept-encoding", "x-other"}


def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(door, held):
    with door.connect() as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert read_answer(connection).status == 200
    assert "expect" not in {name.lower() for name in held.headers[-1]}


def test_openai_has_the_limits_of_other_requests_and_no_answer_without_its_gateway(opened):
    door, asked = opened(**WITH_GATEWAY), b'{"model": "plain"}'
    refused(door.send("POST", COMPLETIONS, b"1\r\n{\r\n0\r\n\r\n", transfer_encoding="chunked"), 411)
    refused(door.send("POST", COMPLETIONS), 411)
    refused(door.post(COMPLETIONS, b" " * (LONGEST_REQUEST + 1)), 413)
    refused(door.post(COMPLETIONS, asked, content_encoding="gzip"), 415)
    without, posted = opened(), (path.format(tenant="plain") for path in (COMPLETIONS, *ENDPOINTS))
    asks = (partial(lambda path, door: door.post(path, asked), path) for path in posted)
    for ask in (lambda door: door.send("GET", "/v1/models"), *asks):
        eventually(lambda: mentions(ask(door).error, "[draining]") and ask(door).status == 503)  # noqa: B023
        refused(ask(without), 404)


def test_slow_clients_are_cut_off(opened):
    door = opened(HPLM_PATIENCE="500ms", HPLM_SILENCE="10m")
    for sent in ("", "Content-Length: 1000\r\n\r\n{"):  # half of the headers, and of the body
        connection = door.connect()
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{sent}".encode())
        assert read_answer(connection).status == 408, sent
    silent = opened(HPLM_PATIENCE="10m", HPLM_SILENCE="1s").knock()
    assert silent.recv(1) == b"", "without TLS handshake"


@pytest.mark.parametrize("closed", [("http", "grpc"), ("grpc",)])
def test_a_server_that_is_gone_is_unavailable(opened, closed):
    door = opened(**dict.fromkeys(closed, CLOSED))
    plain = {"path": SERVICE + "ModelInfer", "content_type": "application/grpc"}
    eventually(lambda: door.post(**plain).status == 200)
    assert "content-type: application/grpc" in door.post(**plain).head
    eventually(lambda: "[draining]" in str(door.infer(way="metadata")))
    assert door.infer(way="metadata").status == 503
    if "http" in closed:  # also requests that the door would refuse
        for way, side in (("json", 1), ("json", 1 << 42), ("metadata", 1 << 42)):
            assert mentions(door.infer(way=way, side=side), "[draining]"), (way, side)
