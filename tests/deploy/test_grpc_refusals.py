"""The front door refuses gRPC requests with a gRPC status and our word."""

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.deploy.door import haproxy, require_haproxy
from tests.deploy.stand_in import Held, grpc_stand_in, http_stand_in
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

MESSAGE = service_pb2.ModelInferRequest(model_name="toy")
CLOSED = "127.0.0.1:1"  # nobody listens there


@pytest.fixture(scope="module")
def urls():
    require_haproxy()
    held = Held(larger_than=1 << 30)
    with http_stand_in(held) as http, grpc_stand_in(held) as grpc:
        yield http, grpc


@pytest.fixture(scope="module")
def door(urls, tmp_path_factory):
    with haproxy(tmp_path_factory.mktemp("door"), *urls, "toy") as door:
        eventually(lambda: error_of(door) is None)
        yield door


def error_of(door, method="ModelInfer", **more):
    credentials = grpc.ssl_channel_credentials(door.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{door.port}", credentials, [("grpc.enable_retries", 0)]) as channel:
        try:
            getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(MESSAGE, timeout=PATIENCE, **more)
        except grpc.RpcError as error:
            return error
    return None


def refused(error, code, *words):
    assert error.code().name == code and mentions(error.details(), *words), error
    return True


def test_other_methods(door):
    assert refused(error_of(door, "ModelConfig"), "UNIMPLEMENTED", "[invalid_input]", "inference")


def test_compressed_messages(door):
    error = error_of(door, compression=grpc.Compression.Gzip)
    assert refused(error, "INVALID_ARGUMENT", "[invalid_input]", "compression")


def test_compressed_bodies(door):
    error = error_of(door, metadata=[("content-encoding", "gzip")])
    assert refused(error, "INVALID_ARGUMENT", "[invalid_input]", "Content-Encoding")


def test_long_headers(door):
    error = error_of(door, metadata=[("authorization", "a" * 10_000)])
    assert refused(error, "INVALID_ARGUMENT", "[invalid_input]", "8")


def test_a_door_without_a_server(urls, tmp_path):
    with haproxy(tmp_path / "none", CLOSED, CLOSED, "toy") as door:
        eventually(lambda: "[draining]" in error_of(door).details())
        assert refused(error_of(door), "UNAVAILABLE", "[draining]")


def test_a_server_whose_grpc_is_gone(urls, tmp_path):
    with haproxy(tmp_path / "gone", urls[0], CLOSED, "toy") as door:
        method = "/inference.GRPCInferenceService/ModelInfer"
        eventually(lambda: door.post(method, content_type="application/grpc").status == 200)
        assert "content-type: application/grpc" in door.post(method, content_type="application/grpc").head
        eventually(lambda: "[draining]" in error_of(door).details())
        assert refused(error_of(door), "UNAVAILABLE", "[draining]")
