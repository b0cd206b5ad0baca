"""HTTP for threads: tritonclient makes and reads the bodies, the standard library carries them.

tritonclient's own HTTP client runs on gevent: its sockets belong to the thread that made them, and every thread that
used it leaves four file descriptors behind when it ends. Here all threads share one pool of plain connections.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

import tritonclient.http
from tritonclient.http import InferenceServerClient, InferResult

from hplm_client.errors import ClientTimeout, ConnectionLost, NotConnected, UnexpectedAnswer, refusal
from hplm_client.settings import Settings, host_and_port


class HttpTransport:
    library = tritonclient.http

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: deque[TimedConnection] = deque()  # the latest used is taken first
        self._process = os.getpid()
        self._closed = False

    def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        body, json_bytes = InferenceServerClient.generate_request_body(**arguments)
        headers = {"inference-header-content-length": str(json_bytes)}
        path = f"/v2/models/{quote(backbone, safe='')}/infer"
        answer, json_length = self._expect_ok(*self._exchange("POST", path, seconds, body, headers))
        try:
            return InferenceServerClient.parse_response_body(answer, header_length=json_length)
        except (ValueError, KeyError, TypeError) as error:
            raise self._unexpected(answer) from error

    def ready(self, backbone: str | None, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        paths = ["/v2/health/ready"] + ([] if backbone is None else [f"/v2/models/{quote(backbone, safe='')}/ready"])
        return all(self._exchange("GET", path, ends - time.monotonic())[0] == 200 for path in paths)

    def statistics(self, seconds: float) -> dict[str, Any]:
        body, _ = self._expect_ok(*self._exchange("GET", "/v2/models/stats", seconds))
        try:
            return json.loads(body)
        except ValueError as error:
            raise self._unexpected(body) from error

    def close(self) -> None:
        self._closed = True
        while (connection := self._pop()) is not None:
            connection.close()

    def _exchange(
        self, method: str, path: str, seconds: float, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, int | None]:
        """Status, body, and how much of the body is JSON. Every wait for the server ends when `seconds` are over; how long a
        name takes to become addresses is the system's to say.
        """
        ends = time.monotonic() + seconds
        connection = self._take()
        try:
            sock = connection.sock or self._connect(connection, ends)
            sock.ends = ends
            connection.request(method, path, body, {**self._settings.headers, **(headers or {})})
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            connection.close()
            raise ClientTimeout(f"no answer from {self._settings.url} within {seconds:.3g} s") from error
        except (OSError, HTTPException) as error:
            connection.close()
            reason = f"{type(error).__name__}: {error}"
            raise ConnectionLost(f"connection to {self._settings.url} lost after sending ({reason})") from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        length = response.getheader("inference-header-content-length")
        return response.status, content, None if length is None else int(length)

    def _connect(self, connection: TimedConnection, ends: float) -> TimedSocket:
        try:
            connection.sock = sock = _connected(connection.host, connection.port, ends)
        except TimeoutError:
            raise
        except OSError as error:
            raise NotConnected(f"cannot connect to {self._settings.url} over HTTP: {error}") from error
        return sock

    def _take(self) -> TimedConnection:
        if self._process != os.getpid():  # forked: who shares a connection with its parent reads its parent's answers
            self._idle, self._process = deque(), os.getpid()
        while (connection := self._pop()) is not None:
            if connection.sock is not None and _is_quiet(connection.sock):
                return connection
            connection.close()
        return TimedConnection(*host_and_port(self._settings.url))

    def _pop(self) -> TimedConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give_back(self, connection: TimedConnection) -> None:
        if connection.sock is not None:
            self._idle.append(connection)
        if self._closed:  # while this request was under way: nobody else will close what it has put back
            self.close()

    def _unexpected(self, body: bytes) -> UnexpectedAnswer:
        return UnexpectedAnswer(f"{self._settings.url} answered something that is no answer of Triton's: {body[:80]!r}")

    def _expect_ok(self, status: int, body: bytes, json_length: int | None) -> tuple[bytes, int | None]:
        if status == 200:
            return body, json_length
        try:
            message = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):  # a proxy's page, not Triton's JSON
            message = body[:200].decode(errors="replace").strip() or "no message"
        raise refusal(f"{message} (HTTP {status} from {self._settings.url})", str(status))


class TimedSocket(socket.socket):
    """Sends and receives until `ends` altogether. A socket's timeout alone begins anew with each piece that comes, so
    that a server which sends a byte now and then would hold its client for ever.
    """

    ends: float

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._limit()
        return super().recv_into(*arguments)

    def _limit(self) -> None:
        remaining = self.ends - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self.settimeout(remaining)


class TimedConnection(HTTPConnection):
    """Its socket is one of ours; None while it is not connected."""

    sock: TimedSocket | None


def _connected(host: str, port: int, ends: float) -> TimedSocket:
    """To the first of the host's addresses that answers. A silent one takes half of what is left, unless it is the last."""
    *others, last = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for resolved in others:
        with suppress(OSError):
            return _connected_to(resolved, ends, share=0.5)
    return _connected_to(last, ends, share=1.0)


def _connected_to(resolved: tuple, ends: float, share: float) -> TimedSocket:
    family, kind, protocol, _, address = resolved
    remaining = ends - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    sock = TimedSocket(family, kind, protocol)
    try:
        sock.settimeout(share * remaining)
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is still good: one that the server has closed, or wrote to unasked, is readable."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
