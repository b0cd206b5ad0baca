"""The front door of deploy/haproxy as its operator starts it: the real HAProxy with the file there, on a free port."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.image import DEPLOY
from tests.server.stock import LIBRARIES, Stock

CONFIG = DEPLOY / "haproxy" / "haproxy.cfg"
PATIENCE = 30.0  # seconds, of a socket


def require_haproxy() -> None:
    for program in ("haproxy", "openssl"):
        if _found(program) is None:
            pytest.skip(f"no {program} on PATH (Debian, Ubuntu: apt-get install {program})")


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")  # Debian's users do not have it


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]


@dataclass(frozen=True)
class Door:
    port: int
    certificate: Path
    log: Path

    def connect(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.certificate))
        return context.wrap_socket(self.knock(), server_hostname="localhost")

    def knock(self) -> socket.socket:
        """Returns a connection without TLS."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def post(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        return self.send("POST", path, body, content_length=str(len(body)), **headers)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Sends a request as it is given. Reads its answer even if the connection is closed before all of it was sent."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        with self.connect() as connection:
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
    return Answer(int(head.split()[1]), body)


class StockAtDoor(Stock):
    def __init__(self, door: Door, protocol: str) -> None:
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


@contextmanager
def haproxy(folder: Path, http_url: str, grpc_url: str, backbones: str, **settings: int) -> Iterator[Door]:
    folder.mkdir(exist_ok=True)
    certificate, pair = _certificate(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "HPLM_DOOR": f"127.0.0.1:{port}",
        "HPLM_CERTIFICATE": str(pair),
        "HPLM_HTTP": http_url,
        "HPLM_GRPC": grpc_url,
        "HPLM_BACKBONES": backbones,
        "HPLM_PROBED": backbones.split()[0],
        "HPLM_DOOR_LUA": str(CONFIG.parent / "door.lua"),
        **{name: str(value) for name, value in settings.items()},
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(_found("haproxy")), "-db", "-f", str(CONFIG)], env=environment, stdout=output, stderr=output
        )
    door = Door(port, certificate, log)
    try:
        eventually(lambda: _is_open(door, process))
        yield door
    finally:
        process.terminate()
        process.wait(PATIENCE)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _is_open(door: Door, process: subprocess.Popen) -> bool:
    assert process.poll() is None, door.log.read_text()
    try:
        return bool(door.send("GET", "/v2/health/ready"))
    except OSError:
        return False


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key, pair = folder / "certificate.pem", folder / "key.pem", folder / "pair.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout"
    subprocess.run(["openssl", *words.split(), str(key), "-out", str(certificate)], check=True, capture_output=True)
    pair.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate, pair
