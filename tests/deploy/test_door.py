"""The front door, a real HAProxy before a real Triton: what ends or stalls the server is refused, all else gets through."""

import gzip
import json
import os
import random
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from testing.toy import TENANTS, WORDS
from tests.deploy.door import StockAtDoor, haproxy, read_answer, require_haproxy
from tests.deploy.image import DEPLOY
from tests.server.stock import Stock
from tests.support.answers import Comparison
from tests.support.message import mentions
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

INFER = "/v2/models/toy/infer"
LONGEST_REQUEST = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def door(server, tmp_path_factory):
    with haproxy(tmp_path_factory.mktemp("door"), server.http_url, server.grpc_url, "toy other") as door:
        yield door
    assert "Lua" not in door.log.read_text(errors="replace"), "the filter failed"


@pytest.fixture(autouse=True)
def server_lives(server):
    pid = server.pid
    yield
    assert Stock(server, "http").ask([WORDS[0]], "acme")["LABEL"].shape == (1, 1)
    assert server.pid == pid


def body_of(texts, shape=None, **more):
    text = {"name": "TEXT", "shape": shape or [len(texts), 1], "datatype": "BYTES", "data": texts}
    return json.dumps({"parameters": {"tenant": "acme"}, "inputs": [text], **more}).encode()


def refused(answer, status=400, *words):
    assert answer.status == status, answer
    assert mentions(answer.error, "[invalid_input]", *words), answer
    return True


def test_long_headers_are_refused(door):
    assert refused(door.post(INFER, body_of(["a"]), authorization="Bearer " + "a" * 10_000), 431, "8 KB")
    assert door.post(INFER, body_of(["a"]), authorization="Bearer " + "a" * 5_000).status == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_answers_equal_the_reference(door, reference, protocol, model):
    stock, comparison = StockAtDoor(door, protocol), Comparison()
    for tenant in TENANTS:
        logits = stock.ask(["a few words"], tenant.id, model=model)["LOGITS"][0]
        comparison.add(tenant.id, logits, reference.forward("a few words", tenant.id).numpy())
    comparison.assert_equal("fp32")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_large_requests_and_all_parameters_get_through(door, protocol):
    stock = StockAtDoor(door, protocol)
    longest = " ".join(random.Random(0).choices(WORDS, k=1000))
    answer = stock.ask([longest] * 1024, "acme", truncate=True, top_k=2, hplm_priority=-3, hplm_rung=1, timeout=500_000_000)
    assert answer["LABEL"].shape == (1024, 2)


def test_large_json_gets_through(door):
    text = 'quotes " and \\ escapes \u00fc \u20ac \U0001f600 [[[[ {"classification": 1} ' * 100
    answer = door.post(
        INFER, body_of([text] * 100, outputs=[{"name": "LABEL"}], parameters={"tenant": "acme", "truncate": True})
    )
    assert answer.status == 200 and len(json.loads(answer.body)["outputs"][0]["data"]) == 100, answer
    assert door.post("/v2/models/toy/generate", json.dumps({"TEXT": WORDS[0], "tenant": "acme"}).encode()).status == 200


def test_errors_of_the_server_arrive_as_they_are(door):
    for protocol in ("http", "grpc"):
        with pytest.raises(InferenceServerException, match="no_tenant"):
            StockAtDoor(door, protocol).ask([WORDS[0]], "nobody")


def test_health_is_open(door):
    assert door.send("GET", "/v2/health/live").status == door.send("GET", "/v2/health/ready").status == 200
    assert StockAtDoor(door, "grpc").client.is_server_ready()


@pytest.mark.parametrize(
    "shape", [[1 << 42], [1 << 42, 1], [65535, 65535], [-1, 1], [1e5, 1], [1.5], ["1"] * 9, [9999] * 12, [10**30, 1]], ids=str
)
def test_absurd_shapes_are_refused(door, shape):
    if isinstance(shape[0], str):
        shape = [int(size) for size in shape] + [1 << 31]
    assert refused(door.post(INFER, body_of(["a"], shape)), 400, "shape") or True
    deep = b" " * 200_000 + body_of(["a"], shape)  # after Triton has seen the beginning
    assert refused(door.post(INFER, deep), 400)


def test_deep_json_is_refused(door):
    assert refused(door.post(INFER, b"[" * 100_000), 400, "JSON")
    assert refused(door.post(INFER, b'{"id":' * 100_000), 400, "JSON")
    deep = body_of(["a" * 300_000])[:-1] + b',"id":' + b"[" * 100_000
    assert refused(door.post(INFER, deep), 400, "JSON")


def test_long_strings_other_than_texts_are_refused(door):
    assert refused(door.post(INFER, body_of(["a"], id="i" * 2000)), 400)
    assert refused(door.post(INFER, body_of(["a"], id="i" * 500_000)), 400)
    assert refused(door.post(INFER, body_of(["a"], parameters={"t" * 200: 1})), 400)


def test_many_values_are_refused(door):
    assert refused(door.post(INFER, body_of([""] * 1_000_000, [1024, 1])), 400, "JSON")


@pytest.mark.parametrize("escaped", [False, True])
def test_unknown_keys_are_refused(door, escaped):
    body = body_of(["a"], outputs=[{"name": "LABEL", "parameters": {"classification": 1}}])
    if escaped:
        body = body.replace(b"classification", b"class\\u0069fication")
    assert refused(door.post(INFER, body), 400)
    assert refused(
        door.post(INFER, body_of(["b" * 500_000], outputs=[{"parameters": {"classification": 1}}])), 400, "'classification'"
    )
    shared = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"shared_memory_region": "any"}}
    assert refused(door.post(INFER, body_of(["a"], inputs=[shared])), 400, "'shared_memory_region'")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_class_count_of_stock_clients_is_refused(door, protocol):
    stock = StockAtDoor(door, protocol)
    text = stock.tensor("TEXT", np.array([[b"a"]], dtype=object))
    wanted = stock._library.InferRequestedOutput("LABEL", class_count=1)
    with pytest.raises(InferenceServerException) as caught:
        stock.client.infer("toy", [text], outputs=[wanted], parameters={"tenant": "acme"})
    assert mentions(caught.value, "[invalid_input]", "'classification'")


def test_chunks_are_refused(door):
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body_of(["a" * 600_000])) + b"0\r\n\r\n"
    assert len(chunks) > 3_600_000
    assert refused(door.send("POST", INFER, chunks, transfer_encoding="chunked"), 411)
    both = door.send("POST", INFER, b"0\r\n\r\n", transfer_encoding="chunked", content_length="5")
    assert both.status in (400, 411)
    assert refused(door.send("POST", INFER), 411)


ENDED = [r"acme\u0000zzz", r"acme\u001b", r"acme\u007f", r"acme\n", r"\\acme\\\t"]  # as JSON writes them


@pytest.mark.parametrize("name", ENDED)
def test_a_tenant_with_a_control_character_is_refused(door, name):
    """Triton ends a parameter at a NUL, so that it would be answered as another tenant."""
    body = body_of(["a"]).replace(b'"acme"', f'"{name}"'.encode())
    assert refused(door.post(INFER, body), 400, "control character")
    assert refused(door.post(INFER.replace("infer", "generate"), f'{{"TEXT": "a", "tenant": "{name}"}}'.encode()), 400)
    message = message_of(b"a")
    message.parameters["tenant"].string_param = json.loads(f'"{name}"')
    assert Grpc(door).refused(message, "control character")


def test_a_body_is_read_alike_in_pieces(tmp_path):
    require_haproxy()
    script = Path(__file__).with_name("in_pieces.lua")
    (tmp_path / "haproxy.cfg").write_text(f"global\n    lua-load {script}\nfrontend one\n    bind 127.0.0.1:1\n")
    environment = {**os.environ, "HPLM_DOOR_LUA": str(DEPLOY / "haproxy/door.lua")}
    done = subprocess.run(["haproxy", "-c", "-f", "haproxy.cfg"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_texts_and_names_with_other_escapes_pass(door):
    body = body_of(['a\n\u0007 "x\\\\u0000']).replace(b'"acme"', rb'"\u0061cme"')
    answer = door.post(INFER, body)
    assert answer.status == 200, answer
    assert refused(door.post(INFER, body_of(["a"]).replace(b'"tenant"', rb'"tenant\n"')), 400)


def test_compressed_bodies_are_refused(door):
    bomb = gzip.compress(body_of(["a" * 200_000_000]))
    assert len(bomb) < 300_000
    assert refused(door.post(INFER, bomb, content_encoding="gzip"), 415)
    assert refused(door.post(INFER, body_of(["a"]), content_encoding="identity"), 415)


def test_bodies_of_more_than_16_mb_are_refused(door):
    assert refused(door.post(INFER, body_of(["a" * LONGEST_REQUEST])), 413, 16)
    answer = door.post(INFER, body_of(["a" * (LONGEST_REQUEST - 1000)]))
    assert answer.status == 400 and mentions(answer.error, "100,000"), "this one hPLM refuses"


@pytest.mark.parametrize("size", ["0", "-1", "99999999999", "1e3", "x", "5, 6"])
def test_wrong_sizes_of_json_are_refused(door, size):
    assert refused(door.post(INFER, body_of(["a"]), inference_header_content_length=size), 400)


@pytest.mark.parametrize(
    "path",
    [
        "/", "/metrics", "/v2", "/v2/models/toy", "/v2/models/toy/config", "/v2/models/toy/stats", "/v2/models/toy/ready",
        "/v2/models/stats", "/v2/repository/index", "/v2/repository/models/toy-upper/load", "/v2/logging", "/v2/trace/setting",
        "/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/any/register", "/v2/cudasharedmemory/status",
        "/v2/models/toy-lookup/infer", "/v2/models/toy-upper/infer", "/v2/models/toy-admin/infer", "/v2/models/nobody/infer",
        "/v2/models/toy/infer/", "/v2//models/toy/infer", "/v2/models/toy-lookup/../toy/infer", "/v2/models/%74oy/infer",
        "/v2/models/toy/trace/setting", "/v2/models/toy-upper/versions/1/infer", "/v2/models/toy/versions/x/infer",
    ],
)  # fmt: skip
def test_other_paths_are_not_there(door, server, path):
    name, secret = server.admin_header
    for method in ("GET", "POST"):
        assert refused(door.send(method, path, content_length="0", **{name.replace("-", "_"): secret}), 404)


def test_other_methods_are_not_there(door):
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert refused(door.send(method, INFER, content_length="0"), 404)


class Grpc:
    """Sends messages as they are given."""

    def __init__(self, door):
        self.stock = StockAtDoor(door, "grpc")  # closes its channel when it goes
        self.channel = self.stock.client._channel

    def ask(self, message, method="ModelInfer"):
        call = self.channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}", bytes, service_pb2.ModelInferResponse.FromString
        )
        try:
            return call(message if isinstance(message, bytes) else message.SerializeToString(), timeout=30)
        except Exception as error:
            return error

    def refused(self, message, *words):
        error = self.ask(message)
        if error.code().name == "CANCELLED":  # before all of it was sent, which hides why
            return len(message if isinstance(message, bytes) else message.SerializeToString()) > 1 << 16
        assert error.code().name == "INVALID_ARGUMENT" and mentions(error.details(), "[invalid_input]", *words), error
        return True


def message_of(*texts, model="toy", shape=None):
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["tenant"].string_param = "acme"
    message.inputs.add(name="TEXT", datatype="BYTES", shape=shape or [len(texts), 1])
    message.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in texts))
    return message


def test_what_ends_a_server_is_refused_over_grpc(door):
    grpc = Grpc(door)
    assert grpc.ask(message_of(b"a")).outputs
    assert grpc.refused(message_of(b"a", shape=[1 << 42, 1]), "shape")
    assert grpc.refused(message_of(b"a", shape=[-1, 1]), "shape")
    assert grpc.refused(message_of(b"a", shape=[9999] * 12), "shape")
    assert grpc.refused(message_of(b"a", model="toy-lookup"), "model")
    message = message_of(b"a" * 300_000)
    output = message.outputs.add(name="LABEL")
    output.parameters["classification"].int64_param = 1
    assert grpc.refused(message, "'classification'")
    shared = service_pb2.ModelInferRequest()
    shared.inputs.add(name="TEXT_PAIR").parameters["shared_memory_region"].string_param = "any"
    assert grpc.refused(shared, "'shared_memory_region'")
    # Fields may come in any order, and more than once.
    assert grpc.refused(message_of(b"a" * 200_000).SerializeToString() + shared.SerializeToString(), "'shared_memory_region'")
    assert grpc.refused(message_of(b"a").SerializeToString() + message_of(b"a", model="toy-upper").SerializeToString(), "model")
    unpacked = b"\x2a\x0b\x18\x80\x80\x80\x80\x80\x80\x80\x80\x40" + b"\x00"
    assert grpc.refused(message_of(b"a").SerializeToString() + unpacked[:-1])
    assert grpc.refused(b"\xff" * 100)
    assert grpc.refused(b"\x2b" * 100_000, "protobuf")


def test_other_methods_of_grpc_are_not_there(door):
    grpc = Grpc(door)
    methods = (
        "ModelStreamInfer RepositoryIndex RepositoryModelLoad SystemSharedMemoryRegister CudaSharedMemoryStatus TraceSetting "
        "LogSettings ModelConfig ModelStatistics ModelMetadata ServerMetadata"
    )
    for method in methods.split():
        error = grpc.ask(b"", method)
        assert error.code().name == "UNIMPLEMENTED", error


def test_slow_clients_are_cut_off(door):
    slow, silent, half = door.connect(), door.knock(), door.connect()
    slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode())
    half.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
    assert read_answer(slow).status == read_answer(half).status == 408
    assert silent.recv(1) == b"", "without TLS handshake"


def test_one_address_has_so_many_connections(server, tmp_path):
    with haproxy(tmp_path / "few", server.http_url, server.grpc_url, "toy", HPLM_CONNECTIONS=8) as door:
        others = []
        for _ in range(16):
            with suppress(ConnectionResetError):  # some are refused, which may show at once
                others.append(door.knock())
        eventually(lambda: not lets_in(door))
        for connection in others:
            connection.close()
        eventually(lambda: lets_in(door))


def lets_in(door):
    try:
        return door.send("GET", "/v2/health/ready").status == 200
    except OSError:
        return False


def flood(door, request, times):
    """Returns the status of each of many requests on one connection."""
    with door.connect() as connection:
        connection.sendall(request * times)
        received = b""
        while received.count(b"HTTP/1.1 ") < times:
            received += connection.recv(1 << 16)
    return [int(answer[:3]) for answer in received.split(b"HTTP/1.1 ")[1:]]


def test_failing_requests_fill_no_log(server, tmp_path):
    with haproxy(tmp_path / "log", server.http_url, server.grpc_url, "toy") as door:
        post = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nnull".encode()
        assert set(flood(door, post, 500)) == {500}, "Triton's answer to JSON that it cannot read"
    assert 50 < len(door.log.read_text().splitlines()) < 200


def test_a_server_that_is_down_gets_no_request(server, tmp_path):
    with haproxy(tmp_path / "down", "127.0.0.1:1", "127.0.0.1:1", "toy") as door:
        for body in (body_of(["a"]), body_of(["a"], [1 << 42])):
            answer = door.post(INFER, body)
            assert answer.status == 503 and "[draining]" in answer.error
        for message in (message_of(b"a"), message_of(b"a", shape=[1 << 42])):
            assert Grpc(door).ask(message).code().name == "UNAVAILABLE"
