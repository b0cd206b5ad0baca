"""HTTP for threads: tritonclient makes and reads the bodies, and the standard library sends them.

tritonclient's own HTTP client uses gevent. Its sockets belong to the thread that made them, and every thread that used it
leaves four file descriptors open when it ends. Here all threads share one pool of plain connections.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any
from urllib.parse import quote

import tritonclient.http
from tritonclient.http import InferenceServerClient, InferResult

from hplm_client.errors import ClientTimeout, ConnectionLost, NotConnected, UnexpectedAnswer, refusal
from hplm_client.generation import EVENT, Outputs, Prompt, event_in, object_in
from hplm_client.settings import Settings, host_and_port
from hplm_client.tls import NEEDED, NOT_SPOKEN, not_trusted
from hplm_client.transports.sockets import TimedConnection, TimedSocket, connected, encrypted, is_quiet


class HttpTransport:
    library = tritonclient.http

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: deque[TimedConnection] = deque()  # the last used one is taken first
        self._process = os.getpid()
        self._closed = False
        self._answered = False

    def infer(self, backbone: str, arguments: dict[str, Any], seconds: float) -> InferResult:
        body, json_bytes = InferenceServerClient.generate_request_body(**arguments)
        headers = self._settings.headers_for(arguments["parameters"]) | {"inference-header-content-length": str(json_bytes)}
        path = f"/v2/models/{quote(backbone, safe='')}/infer"
        status, answer, json_length = self._exchange("POST", path, seconds, body, headers)
        expect_ok(status, answer, self._settings.url)
        try:
            return InferenceServerClient.parse_response_body(answer, header_length=json_length)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnexpectedAnswer(f"the answer of {self._settings.url} is not one of Triton's: {answer[:80]!r}") from error

    def generate(self, backbone: str, prompt: Prompt, timeout_us: int | None, seconds: float) -> Generator[Outputs]:
        """Yields responses. `seconds` limit the wait for each. To close the generator closes the connection, which cancels."""
        path, asked = prompt.path(backbone), prompt.body(timeout_us, self._settings.api_key)
        headers = self._settings.headers_for(prompt.parameters())
        if not prompt.stream:
            yield self._json("POST", path, seconds, asked, headers)
            return
        with self._sent("POST", path, seconds, asked, headers) as (response, sock):
            if response.status != 200:
                expect_ok(response.status, response.read().removeprefix(EVENT), self._settings.url)
            while line := response.readline():
                if (event := event_in(line, self._settings.url)) is not None:
                    yield event
                sock.ends = time.monotonic() + seconds
            is_cut_off = response.chunk_left is not None if response.chunked else bool(response.length)
            if is_cut_off:  # `readline` returns nothing then, as at the end
                raise IncompleteRead(b"")

    def ready(self, backbone: str | None, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        if self._exchange("GET", "/v2/health/ready", seconds)[0] != 200:
            return False
        if backbone is None:
            return True
        status, body, _ = self._exchange("GET", f"/v2/models/{quote(backbone, safe='')}/ready", ends - time.monotonic())
        return status == 200 or tells_no_more(status, body)

    def statistics(self, seconds: float) -> dict[str, Any]:
        return self._json("GET", "/v2/models/stats", seconds)

    def metadata(self, model: str, seconds: float) -> dict[str, Any]:
        return self._json("GET", f"/v2/models/{quote(model, safe='')}", seconds)

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
            self._answered = True
            yield response, sock
        except TimeoutError as error:
            connection.close()
            raise ClientTimeout(f"no answer from {self._settings.url} within {seconds:.3g} s") from error
        except (OSError, HTTPException) as error:
            connection.close()
            reason = f"{type(error).__name__}: {error}"
            advice = "" if self._answered or self._settings.context else NEEDED
            raise ConnectionLost(f"connection to {self._settings.url} lost after sending ({reason}){advice}") from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)

    def _connect(self, connection: TimedConnection, ends: float) -> TimedSocket:
        url, context = self._settings.url, self._settings.context
        try:
            sock = connected(connection.host, connection.port, ends)
        except TimeoutError:
            raise
        except OSError as error:
            raise NotConnected(f"cannot connect to {url} over HTTP: {error}") from error
        try:
            connection.sock = sock = sock if context is None else encrypted(sock, context, connection.host, ends)
        except TimeoutError:
            raise
        except ssl.SSLCertVerificationError as error:
            raise not_trusted(url, error.verify_message) from error
        except OSError as error:
            raise NotConnected(f"cannot connect to {url} over HTTP with TLS ({error}){NOT_SPOKEN}") from error
        return sock

    def _take(self) -> TimedConnection:
        if self._process != os.getpid():  # after a fork: a shared connection would read the parent's answers
            self._idle, self._process = deque(), os.getpid()
        while (connection := self._pop()) is not None:
            if connection.sock is not None and is_quiet(connection.sock):
                return connection
            connection.close()
        return TimedConnection(*host_and_port(self._settings.address))

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

    def _json(self, method: str, path: str, seconds: float, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        status, answer, _ = self._exchange(method, path, seconds, body, headers)
        expect_ok(status, answer, self._settings.url)
        return object_in(answer, self._settings.url)


def expect_ok(status: int, body: bytes, url: str) -> None:
    """Raises the error of an answer that is one."""
    if status == 200:
        return
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):  # a proxy's page, not Triton's JSON
        message = body[:200].decode(errors="replace").strip() or "no message"
    raise refusal(f"{message} (HTTP {status} from {url})", str(status))


def tells_no_more(status: int, body: bytes) -> bool:
    """Whether this is the front door's answer to a question about a model's state. Triton itself has others."""
    return status == 404 and b"[invalid_input]" in body
