"""Clients of the front door: the real HAProxy with the file of deploy/haproxy, on a free port."""

from __future__ import annotations

import csv
import json
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hplm_client.errors import HplmClientError, refusal
from loadtest.proxy import HOST, Proxy, reverse_proxy
from tests.deploy.programs import debian_program
from tests.server.stock import LIBRARIES, Stock

PATIENCE = 30.0  # seconds, of a socket
INFER = "/v2/models/toy/infer"


def require_haproxy() -> None:
    for program in ("haproxy", "openssl"):
        debian_program(program)


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    head: str

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]


class DoorToAsk(Proxy):
    @property
    def socket(self) -> Path:
        """Where it takes commands, if it was told to."""
        return self.log.with_name("socket")

    def infer(
        self, tenant: str | None = None, source: str = HOST, size: int = 1, way: str = "json", side: int = 1, **more
    ) -> HplmClientError | None:
        """Sends a request of about so many bytes. `way`: how it names the tenant. Of gRPC all come from HOST."""
        if way == "grpc":
            return self._infer_over_grpc(tenant, size, side, **more)
        given = {"name": "TEXT", "shape": [side, 1], "datatype": "BYTES", "data": ["a" * size]}
        body = {"inputs": [given]}
        if tenant is not None and way != "header":
            body["parameters"] = {"tenant": tenant}
        elif tenant is not None:
            more["hplm_tenant"] = tenant
        sent = json.dumps(body).encode()
        if way == "binary":
            data = struct.pack("<I", size) + b'"}' * (size // 2)
            del given["data"]
            given["parameters"] = {"binary_data_size": len(data)}
            sent = json.dumps(body).encode()
            more["inference_header_content_length"] = str(len(sent))
            sent += data
        answer = self.post(INFER, sent, source, **more)
        if answer.status == 200:
            return None
        waits = re.findall(r"retry-after: (\d+)", answer.head)
        assert not waits or f"retry after {waits[0]} s" in answer.error, answer
        return refusal(answer.error, str(answer.status))

    def _infer_over_grpc(
        self, tenant: str | None, size: int, side: int, method: str = "ModelInfer", **more
    ) -> HplmClientError | None:
        message = service_pb2.ModelInferRequest(model_name="toy", raw_input_contents=[b"a" * size])
        message.inputs.add(name="TEXT", datatype="BYTES", shape=[side, 1])
        credentials = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        metadata = [*more.pop("metadata", []), *([("hplm-tenant", tenant)] if tenant is not None else [])]
        with grpc.secure_channel(f"localhost:{self.port}", credentials, options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                getattr(stub, method)(message, timeout=2 * PATIENCE, metadata=metadata, **more)
            except grpc.RpcError as error:
                return refusal(error.details(), str(error.code()))
        return None

    def waiting(self, backend: str) -> int:
        """Returns how many requests wait in a backend."""
        rows = csv.DictReader(command(self.socket, "show stat").removeprefix("# ").splitlines())
        return sum(int(row["qcur"] or 0) for row in rows if row["pxname"] == backend and row["svname"] == "BACKEND")

    def in_flight(self, key: str, table: str = "tenants_in_flight") -> int:
        """Returns how many requests in flight it counts for a key."""
        found = re.findall(rf"key={key} .*conn_cur=(\d+)", command(self.socket, f"show table {table}"))
        return int(found[0]) if found else 0

    def connect(self, source: str = HOST) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.certificate))
        return context.wrap_socket(self.knock(source), server_hostname="localhost")

    def knock(self, source: str = HOST) -> socket.socket:
        """Returns a connection without TLS."""
        return socket.create_connection((HOST, self.port), timeout=PATIENCE, source_address=(source, 0))

    def post(self, path: str, body: bytes = b"", source: str = HOST, **headers: str) -> Answer:
        return self.send("POST", path, body, source, content_length=str(len(body)), **headers)

    def send(self, method: str, path: str, body: bytes = b"", source: str = HOST, **headers: str) -> Answer:
        """Sends a request as it is given. Reads its answer even if the connection is closed before all of it was sent."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        with self.connect(source) as connection:
            with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
                connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    received = b""
    with suppress(ConnectionResetError, ssl.SSLError):
        while piece := connection.recv(1 << 16):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head, "the connection was closed without an answer"
    return Answer(int(head.split()[1]), body, head.decode())


class StockAtDoor(Stock):
    def __init__(self, door: DoorToAsk, protocol: str) -> None:
        self._library = LIBRARIES[protocol]
        url, certificate = f"localhost:{door.port}", str(door.certificate)
        if protocol == "http":
            secure = {"ssl_context_factory": lambda: ssl.create_default_context(cafile=certificate)}
        else:
            secure = {"root_certificates": certificate}
        self._client = self._library.InferenceServerClient(url, ssl=True, **secure)

    @property
    def client(self):
        return self._client


def command(path: Path, line: str) -> str:
    """Gives HAProxy a command, and returns what it says."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(line.encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while piece := connection.recv(1 << 16):
            said += piece
    return said.decode().strip()


@contextmanager
def haproxy(folder: Path, http_url: str, grpc_url: str, backbones: str, **settings: object) -> Iterator[DoorToAsk]:
    with reverse_proxy(folder, http_url, grpc_url, backbones, **settings) as door:
        yield DoorToAsk(**vars(door))
