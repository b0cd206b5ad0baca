"""Requests to a proxy, the router or the front door: as bytes, over HTTP and gRPC, with each way to name a tenant."""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from hplm_client.errors import HplmClientError, refusal
from tests.support.wait import PATIENCE

HOST = "127.0.0.1"
INFER, GENERATE = "/v2/models/toy/infer", "/v2/models/toy/generate"
SERVICE = "/inference.GRPCInferenceService/"
CLOSED = "127.0.0.1:1"  # nobody listens there
_FIELDS = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}


@dataclass(frozen=True)
class Response:
    status: int | str  # of HTTP, or of gRPC by its name
    body: bytes
    head: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.body.decode() if isinstance(self.status, str) else self.json["error"]

    @property
    def refused(self) -> HplmClientError | None:
        """Returns the exception that our client raises for it."""
        if self.status in (200, "StatusCode.OK"):
            return None
        waits = re.findall(r"retry-after: (\d+)", self.head)
        assert not waits or f"retry after {waits[0]} s" in self.error, self
        return refusal(self.error, str(self.status))

    @property
    def replica(self) -> str:
        """Which fake has answered."""
        assert self.refused is None, self
        return service_pb2.ModelInferResponse.FromString(self.body).model_name if self.status != 200 else self.json["replica"]


class Front:
    """A client of a proxy on this machine."""

    def __init__(self, port: int, certificate: Path | None = None) -> None:
        self.port, self.certificate = port, certificate

    def knock(self, source: str = HOST) -> socket.socket:
        """Returns a connection without TLS."""
        return socket.create_connection((HOST, self.port), timeout=PATIENCE, source_address=(source, 0))

    def connect(self, source: str = HOST) -> socket.socket:
        connection = self.knock(source)
        if self.certificate is None:
            return connection
        return ssl.create_default_context(cafile=self.certificate).wrap_socket(connection, server_hostname="localhost")

    def send(self, method: str, path: str, body: bytes = b"", source: str = HOST, **headers: str) -> Response:
        """Sends a request as it is given. Reads its answer even if the connection is closed before all of it was sent."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        with self.connect(source) as connection:
            with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
                connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            return read_answer(connection)

    def post(self, path: str, body: bytes = b"", source: str = HOST, **headers: str) -> Response:
        return self.send("POST", path, body, source, content_length=str(len(body)), **headers)

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        if self.certificate is None:
            channel = grpc.insecure_channel(f"{HOST}:{self.port}", options)
        else:
            credentials = grpc.ssl_channel_credentials(self.certificate.read_bytes())
            channel = grpc.secure_channel(f"localhost:{self.port}", credentials, options)
        with channel:
            yield channel

    def call(self, message: Any, *metadata: tuple[str, str], method: str = "ModelInfer", **more: Any) -> Response:
        """Sends a message of gRPC, or bytes as they are given."""
        sent = message if isinstance(message, bytes) else message.SerializeToString()
        with self.channel() as channel:
            call = channel.unary_unary(SERVICE + method, bytes, bytes)
            try:
                return Response("StatusCode.OK", call(sent, timeout=PATIENCE, metadata=metadata, **more))
            except grpc.RpcError as error:
                return Response(str(error.code()), (error.details() or "").encode())

    def ask(
        self, tenant: str | None = None, source: str = HOST, size: int = 1, way: str = "json", side: int = 1, **more: Any
    ) -> Response:
        """Sends a request of about so many bytes. `way`: how it names the tenant. Those of gRPC all come from HOST.

        `more`: headers of HTTP, or arguments of a call of gRPC.
        """
        named = {} if tenant is None else {"tenant": tenant}
        if way in ("metadata", "message"):
            parameters = named if way == "message" else {}
            metadata = [("hplm-tenant", name) for name in named.values() if way == "metadata"] + more.pop("metadata", [])
            message = message_of(b"a" * size, shape=[side, 1], **parameters)
            return self.call(message, *metadata, **more)
        if way == "generate":
            return self.post(GENERATE, json.dumps({"text_input": "a" * size, **named}).encode(), source, **more)
        given: dict[str, Any] = {"name": "TEXT", "shape": [side, 1], "datatype": "BYTES", "data": ["a" * size]}
        binary = b""
        if way == "binary":
            binary = struct.pack("<I", size) + b'"}' * (size // 2)
            del given["data"]
            given["parameters"] = {"binary_data_size": len(binary)}
        if way == "header" and tenant is not None:
            more["hplm_tenant"] = tenant
        body = json.dumps({"parameters": {} if way == "header" else named, "inputs": [given]}).encode()
        if binary:
            more["inference_header_content_length"] = str(len(body))
        return self.post(INFER, body + binary, source, **more)


def message_of(
    *texts: bytes, model: str = "toy", shape: list[int] | None = None, **given: Any
) -> service_pb2.ModelInferRequest:
    """Returns a message of gRPC with these texts, as tritonclient writes them, and parameters."""
    parameters = {name: service_pb2.InferParameter(**{_FIELDS[type(value)]: value}) for name, value in given.items()}
    message = service_pb2.ModelInferRequest(model_name=model, parameters=parameters)
    message.inputs.add(name="TEXT", datatype="BYTES", shape=shape or [len(texts), 1])
    message.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in texts))
    return message


def read_answer(connection: socket.socket) -> Response:
    received = b""
    with suppress(ConnectionResetError, ssl.SSLError):
        while piece := connection.recv(1 << 16):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head, "the connection was closed without an answer"
    return Response(int(head.split()[1]), body, head.decode())
