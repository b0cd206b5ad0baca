"""The front door, a real HAProxy before a real Triton: what ends or stalls the server is refused, all else gets through."""

import gzip
import json
import os
import random
import struct
import subprocess
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from testing.toy import WORDS
from tests.deploy.door import INFER, StockAtDoor, haproxy, read_answer, require_haproxy
from tests.deploy.image import DEPLOY
from tests.support.message import mentions
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

GENERATE = INFER.replace("infer", "generate")
LONGEST_REQUEST = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def door(servers, tmp_path_factory):
    require_haproxy()
    server = servers.get("toy")
    with haproxy(tmp_path_factory.mktemp("door"), server.http_url, server.grpc_url, "toy other") as door:
        yield door
    assert "Lua" not in door.log.read_text(errors="replace"), "the filter failed"


def body_of(texts=("a",), shape=None, **more):
    text = {"name": "TEXT", "shape": shape or [len(texts), 1], "datatype": "BYTES", "data": list(texts)}
    return json.dumps({"parameters": {"tenant": "acme"}, "inputs": [text], **more}).encode()


def refused(answer, status=400, *words):
    assert answer.status == status, answer
    assert mentions(answer.error, "[invalid_input]", *words), answer
    return True


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_large_requests_and_all_parameters_get_through(door, protocol):
    stock = StockAtDoor(door, protocol)
    longest = " ".join(random.Random(0).choices(WORDS, k=20_000))[:90_000]
    more = dict(truncate=True, top_k=2, hplm_priority=-3, hplm_rung=1, timeout=500_000_000)
    answer = stock.ask([longest] * 30 + ["a"] * 994, "acme", **more)
    assert answer["LABEL"].shape == (1024, 2)


def test_json_of_any_text_gets_through(door):
    text = 'quotes " and \\ escapes \u00fc \u20ac \U0001f600 [[[[ {"classification": 1} ' * 100
    answer = door.post(
        INFER, body_of([text] * 100, outputs=[{"name": "LABEL"}], parameters={"tenant": "acme", "truncate": True})
    )
    assert answer.status == 200 and len(json.loads(answer.body)["outputs"][0]["data"]) == 100, answer
    assert door.post(GENERATE, json.dumps({"TEXT": WORDS[0], "tenant": "acme"}).encode()).status == 200
    answer = door.post(INFER, body_of(['a\n\u0007 "x\\\\u0000']).replace(b'"acme"', rb'"\u0061cme"'))
    assert answer.status == 200, answer
    assert door.post(INFER, body_of(), authorization="Bearer " + "a" * 5_000).status == 200
    answer = door.post(INFER, body_of(["a" * (LONGEST_REQUEST - 1000)]))
    assert answer.status == 400 and mentions(answer.error, "100,000"), "this one hPLM refuses"
    assert door.send("GET", "/v2/health/live").status == door.send("GET", "/v2/health/ready").status == 200
    assert StockAtDoor(door, "grpc").client.is_server_ready()


@pytest.mark.parametrize(
    "shape",
    [[1 << 42], [1 << 42, 1], [65535, 65535], [-1, 1], [1e5, 1], [1.5], [*range(1, 10), 1 << 31], [9999] * 12, [10**30, 1]],
)
def test_absurd_shapes_are_refused(door, shape):
    assert refused(door.post(INFER, body_of(shape=shape)), 400, "shape")
    assert refused(door.post(INFER, b" " * 200_000 + body_of(shape=shape)))  # after Triton has seen the beginning


CLASSES = {"outputs": [{"name": "LABEL", "parameters": {"classification": 1}}]}
SHARED = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"shared_memory_region": "any"}}
SIZE = "inference_header_content_length"
REFUSED = {
    "deep arrays": lambda: (400, ["JSON"], b"[" * 100_000),
    "deep objects": lambda: (400, ["JSON"], b'{"id":' * 100_000),
    "deep at the end": lambda: (400, ["JSON"], body_of(["a" * 300_000])[:-1] + b',"id":' + b"[" * 100_000),
    "many values": lambda: (400, ["JSON"], body_of([""] * 1_000_000, [1024, 1])),
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
    "a bomb": lambda: (415, [], gzip.compress(body_of(["a" * 200_000_000]), 1), {"content_encoding": "gzip"}),
    "no compression": lambda: (415, [], body_of(), {"content_encoding": "identity"}),
    **{size: lambda size=size: (400, [], body_of(), {SIZE: size}) for size in ("0", "-1", "99999999999", "1e3", "x", "5, 6")},
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_bodies_that_end_or_stall_a_server_are_refused(door, given):
    status, words, body, *headers = given()
    assert refused(door.post(INFER, body, **(headers[0] if headers else {})), status, *words)


def test_chunks_are_refused(door):
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body_of(["a" * 600_000])) + b"0\r\n\r\n"
    assert refused(door.send("POST", INFER, chunks, transfer_encoding="chunked"), 411)
    both = door.send("POST", INFER, b"0\r\n\r\n", transfer_encoding="chunked", content_length="5")
    assert both.status in (400, 411)
    assert refused(door.send("POST", INFER), 411)


@pytest.mark.parametrize(
    "name", [r"acme\u0000zzz", r"acme\u001b", r"acme\u007f", r"acme\n", r"\\acme\\\t"]
)  # as JSON writes them
def test_a_tenant_with_a_control_character_is_refused(door, name):
    """Triton ends a parameter at a NUL, so that it would be answered as another tenant."""
    assert refused(door.post(INFER, body_of().replace(b'"acme"', f'"{name}"'.encode())), 400, "control character")
    assert refused(door.post(GENERATE, f'{{"TEXT": "a", "tenant": "{name}"}}'.encode()), 400)
    message = message_of(b"a")
    message.parameters["tenant"].string_param = json.loads(f'"{name}"')
    assert refused_over_grpc(door, message, "control character")


def test_a_body_is_read_alike_in_pieces(tmp_path):
    require_haproxy()
    script = Path(__file__).with_name("in_pieces.lua")
    (tmp_path / "haproxy.cfg").write_text(f"global\n    lua-load {script}\nfrontend one\n    bind 127.0.0.1:1\n")
    environment = {**os.environ, "HPLM_DOOR_LUA": str(DEPLOY / "haproxy/door.lua")}
    done = subprocess.run(["haproxy", "-c", "-f", "haproxy.cfg"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    "path",
    [
        "/", "/metrics", "/v2", "/v2/models/toy", "/v2/models/toy/config", "/v2/models/toy/stats", "/v2/models/toy/ready",
        "/v2/models/stats", "/v2/repository/index", "/v2/repository/models/toy-upper/load", "/v2/logging", "/v2/trace/setting",
        "/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/any/register", "/v2/cudasharedmemory/status",
        "/v2/models/toy-lookup/infer", "/v2/models/toy-upper/infer", "/v2/models/toy-admin/infer", "/v2/models/nobody/infer",
        "/v2/models/toy/infer/", "/v2//models/toy/infer", "/v2/models/toy-lookup/../toy/infer", "/v2/models/%74oy/infer",
        "/v2/models/toy/trace/setting", "/v2/models/toy-upper/versions/1/infer", "/v2/models/toy/versions/x/infer", INFER,
    ],
)  # fmt: skip
def test_other_paths_and_methods_are_not_there(door, server, path):
    name, secret = server.server.admin_header
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE") if path == INFER else ("GET", "POST"):
        assert refused(door.send(method, path, content_length="0", **{name.replace("-", "_"): secret}), 404)


def ask_over_grpc(door, message, method="ModelInfer"):
    """Sends a message as it is given. Returns the answer or the error."""
    sent = message if isinstance(message, bytes) else message.SerializeToString()
    credentials = grpc.ssl_channel_credentials(door.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{door.port}", credentials) as channel:
        path = f"/inference.GRPCInferenceService/{method}"
        try:
            return channel.unary_unary(path, bytes, service_pb2.ModelInferResponse.FromString)(sent, timeout=30)
        except grpc.RpcError as error:
            return error


def refused_over_grpc(door, message, *words):
    error = ask_over_grpc(door, message)
    is_long = len(message if isinstance(message, bytes) else message.SerializeToString()) > 1 << 16
    if not is_long or error.code().name not in ("CANCELLED", "UNAVAILABLE"):  # before all of it was sent, which hides why
        assert error.code().name == "INVALID_ARGUMENT" and mentions(error.details(), "[invalid_input]", *words), error
    return True


def message_of(*texts, model="toy", shape=None):
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["tenant"].string_param = "acme"
    message.inputs.add(name="TEXT", datatype="BYTES", shape=shape or [len(texts), 1])
    message.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in texts))
    return message


def test_messages_that_end_a_server_are_refused_over_grpc(door):
    good = message_of(b"a").SerializeToString()
    assert ask_over_grpc(door, good).outputs
    classes, shared = message_of(b"a" * 300_000), service_pb2.ModelInferRequest()
    classes.outputs.add(name="LABEL").parameters["classification"].int64_param = 1
    shared.inputs.add(name="TEXT_PAIR").parameters["shared_memory_region"].string_param = "any"
    unpacked = b"\x2a\x0b\x18\x80\x80\x80\x80\x80\x80\x80\x80\x40"
    for message, *words in (
        *((message_of(b"a", shape=shape), "shape") for shape in ([1 << 42, 1], [-1, 1], [9999] * 12)),
        (message_of(b"a", model="toy-lookup"), "model"),
        (classes, "'classification'"),
        (shared, "'shared_memory_region'"),
        # Fields may come in any order, and more than once.
        (message_of(b"a" * 200_000).SerializeToString() + shared.SerializeToString(), "'shared_memory_region'"),
        (good + message_of(b"a", model="toy-upper").SerializeToString(), "model"),
        (good + unpacked,),
        (b"\xff" * 100,),
        (b"\x2b" * 100_000, "protobuf"),
    ):
        assert refused_over_grpc(door, message, *words)


def test_other_methods_of_grpc_are_not_there(door):
    methods = (
        "ModelStreamInfer RepositoryIndex RepositoryModelLoad SystemSharedMemoryRegister CudaSharedMemoryStatus TraceSetting "
        "LogSettings ModelConfig ModelStatistics ModelMetadata ServerMetadata"
    )
    for method in methods.split():
        assert ask_over_grpc(door, b"", method).code().name == "UNIMPLEMENTED"


def test_slow_clients_are_cut_off(server, tmp_path):
    with haproxy(tmp_path, server.http_url, server.grpc_url, "toy", HPLM_PATIENCE="500ms", HPLM_SILENCE="1s") as door:
        eventually(lambda: door.post(INFER, body_of()).status == 200)  # else it refuses before it waits for a body
        slow, silent, half = door.connect(), door.knock(), door.connect()
        slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode())
        half.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
        assert read_answer(slow).status == read_answer(half).status == 408
        assert silent.recv(1) == b"", "without TLS handshake"
