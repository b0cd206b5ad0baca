"""Clients of the front door: the real HAProxy with the file of deploy/haproxy, on a free port."""

from __future__ import annotations

import csv
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loadtest.door import HOST, Door, front_door
from tests.deploy.programs import debian_program
from tests.server.stock import LIBRARIES, Stock

PATIENCE = 30.0  # seconds, of a socket


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


class DoorToAsk(Door):
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


def waiting(path: Path, backend: str) -> int:
    """Returns how many requests wait in a backend of HAProxy, whose commands come through this socket."""
    rows = csv.DictReader(command(path, "show stat").removeprefix("# ").splitlines())
    return sum(int(row["qcur"] or 0) for row in rows if row["pxname"] == backend and row["svname"] == "BACKEND")


@contextmanager
def haproxy(folder: Path, http_url: str, grpc_url: str, backbones: str, **settings: object) -> Iterator[DoorToAsk]:
    with front_door(folder, http_url, grpc_url, backbones, **settings) as door:
        yield DoorToAsk(**vars(door))
