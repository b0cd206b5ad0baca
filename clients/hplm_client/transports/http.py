"""HTTP for threads: tritonclient makes and reads the bodies, and the standard library sends them.

tritonclient's own HTTP client uses gevent. Its sockets belong to the thread that made them, and every thread that used it
leaves four file descriptors open when it ends. Here all threads share one pool of plain connections.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote

import tritonclient.http
from tritonclient.http import InferenceServerClient, InferResult

from hplm_client.errors import ClientTimeout, ConnectionLost, NotConnected, UnexpectedAnswer, refusal
from hplm_client.generation import EVENT, Outputs, Prompt, event_in
from hplm_client.settings import Settings, host_and_port


class HttpTransport:
    library = tritonclient.http

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: deque[TimedConnection] = deque()  # the last used one is taken first
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

    def generate(self, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float) -> Generator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator closes the connection, which cancels."""
        path, asked = prompt.path(backbone), prompt.body(timeout_us, self._settings.api_key)
        if not prompt.stream:
            yield self._json(self._expect_ok(*self._exchange("POST", path, seconds, asked))[0])
            return
        with self._sent("POST", path, seconds, asked) as (response, sock):
            if response.status != 200:
                self._expect_ok(response.status, response.read().removeprefix(EVENT), None)
            while line := response.readline():
                if (event := event_in(line, self._settings.url)) is not None:
                    yield event
                sock.ends = time.monotonic() + seconds

    def ready(self, backbone: str | None, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        paths = ["/v2/health/ready"] + ([] if backbone is None else [f"/v2/models/{quote(backbone, safe='')}/ready"])
        return all(self._exchange("GET", path, ends - time.monotonic())[0] == 200 for path in paths)

    def statistics(self, seconds: float) -> dict[str, Any]:
        return self._json(self._expect_ok(*self._exchange("GET", "/v2/models/stats", seconds))[0])

    def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        return self._json(self._expect_ok(*self._exchange("GET", f"/v2/models/{quote(model, safe='')}", seconds))[0])

    def close(self) -> None:
        self._closed = True
        while (connection := self._pop()) is not None:
            connection.close()

    def _exchange(
        self, method: str, path: str, seconds: float, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, int | None]:
        """Returns the status, the body, and how many bytes of the body are JSON."""
        with self._sent(method, path, seconds, body, headers) as (response, _):
            content = response.read()
        length = response.getheader("inference-header-content-length")
        return response.status, content, None if length is None else int(length)

    @contextmanager
    def _sent(
        self, method: str, path: str, seconds: float, body: bytes, headers: dict[str, str] | None = None
    ) -> Generator[tuple[HTTPResponse, TimedSocket]]:
        """Sends a request, and takes the connection back when the response was read to its end.

        Every wait for the server ends after `seconds`. Only the system limits the time for resolving the host name.
        """
        ends = time.monotonic() + seconds
        connection = self._take()
        try:
            sock = connection.sock or self._connect(connection, ends)
            sock.ends = ends
            connection.request(method, path, body, {**self._settings.headers, **(headers or {})})
            response = connection.getresponse()
            yield response, sock
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

    def _connect(self, connection: TimedConnection, ends: float) -> TimedSocket:
        try:
            connection.sock = sock = _connected(connection.host, connection.port, ends)
        except TimeoutError:
            raise
        except OSError as error:
            raise NotConnected(f"cannot connect to {self._settings.url} over HTTP: {error}") from error
        return sock

    def _take(self) -> TimedConnection:
        if self._process != os.getpid():  # after a fork: a shared connection would read the parent's answers
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
        if self._closed:  # closed during this request: its connection must be closed here
            self.close()

    def _unexpected(self, body: bytes) -> UnexpectedAnswer:
        return UnexpectedAnswer(f"the answer of {self._settings.url} is not one of Triton's: {body[:80]!r}")

    def _json(self, body: bytes) -> dict[str, Any]:
        try:
            return json.loads(body)
        except ValueError as error:
            raise self._unexpected(body) from error

    def _expect_ok(self, status: int, body: bytes, json_length: int | None) -> tuple[bytes, int | None]:
        if status == 200:
            return body, json_length
        try:
            message = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):  # a proxy's page, not Triton's JSON
            message = body[:200].decode(errors="replace").strip() or "no message"
        raise refusal(f"{message} (HTTP {status} from {self._settings.url})", str(status))


class TimedSocket(socket.socket):
    """Limits all sending and receiving together to the time `ends`.

    A socket's own timeout starts again with each piece of data. A server that sends a byte now and then could so block its
    client for ever.
    """

    ends: float

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self._limit()
        return super().recv_into(buffer, nbytes, flags)

    def _limit(self) -> None:
        remaining = self.ends - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self.settimeout(remaining)


class TimedConnection(HTTPConnection):
    """A connection whose socket is a TimedSocket, or None while it is not connected."""

    sock: TimedSocket | None


def _connected(host: str, port: int, ends: float) -> TimedSocket:
    """Connects to the first address of the host that answers.

    An address without an answer takes half of the remaining time, and the last address takes all of it.
    """
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
    """Whether an idle connection can still be used. One that the server has closed, or has written to, is readable."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
