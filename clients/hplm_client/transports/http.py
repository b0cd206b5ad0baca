"""HTTP for threads: the standard library sends what tritonclient makes.

tritonclient's own HTTP client uses gevent. Its sockets belong to the thread that made them, and every thread that used it
leaves four file descriptors open when it ends. Here all threads share one pool of plain connections.
"""

from __future__ import annotations

import os
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead

from hplm_client.errors import NotConnected
from hplm_client.settings import ClientSettings, host_and_port
from hplm_client.tls import NOT_SPOKEN, not_trusted
from hplm_client.transports.http_calls import HttpCalls, Reply
from hplm_client.transports.sockets import TimedConnection, TimedSocket, connected, encrypted, is_quiet


class HttpTransport(HttpCalls):
    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings)
        self._idle: deque[TimedConnection] = deque()  # the last used one is taken first
        self._process = os.getpid()
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        self._close_idle()

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, seconds: float, body: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[Reply]:
        """Sends a request, and takes the connection back when the reply was read to its end.

        Only the system limits the time for resolving the host name.
        """
        ends = time.monotonic() + seconds
        connection = self._take()
        try:
            sock = connection.sock or self._connect(connection, ends)
            sock.ends = ends
            with suppress(ConnectionError, ssl.SSLError):  # a server that refuses a request may not read all of it
                connection.request(method, path, body, headers)
            response = connection.getresponse()
            self._answered = True
            yield _Reply(response, ends, sock)
        except TimeoutError as error:
            connection.close()
            raise self._settings.timed_out(seconds) from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._lost(error) from error
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
            self._close_idle()

    def _close_idle(self) -> None:
        while (connection := self._pop()) is not None:
            connection.close()


@dataclass
class _Reply(Reply):
    sock: TimedSocket

    async def read(self) -> bytes:
        return self.response.read()

    async def line(self) -> bytes:
        self.sock.ends = self.ends
        line = self.response.readline()
        is_cut_off = self.response.chunk_left is not None if self.response.chunked else bool(self.response.length)
        if not line and is_cut_off:  # `readline` returns nothing then, as at the end
            raise IncompleteRead(b"")
        return line
