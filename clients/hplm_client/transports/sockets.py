"""Sockets whose waits end at a given time, for the connections of the HTTP transport."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any


class TimedSocket(socket.socket):
    """Limits all sending and receiving together to the time `ends`.

    A socket's own timeout starts again with each piece of data. A server that sends a byte now and then could so block its
    client for ever.
    """

    ends: float

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._limit()
        super().sendall(data, flags)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        self._limit()
        return super().recv_into(buffer, memoryview(buffer).nbytes if nbytes is None else nbytes, flags)

    def _limit(self) -> None:
        remaining = self.ends - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self.settimeout(remaining)


class TimedTlsSocket(TimedSocket, ssl.SSLSocket):
    """The same with TLS. OpenSSL writes all data of a `sendall` within one timeout."""


class TimedConnection(HTTPConnection):
    """A connection whose socket is a TimedSocket, or None while it is not connected."""

    sock: TimedSocket | None


def connected(host: str, port: int, ends: float) -> TimedSocket:
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


def encrypted(sock: TimedSocket, context: ssl.SSLContext, host: str, ends: float) -> TimedSocket:
    """Returns the same connection with TLS. Raises `ssl.SSLCertVerificationError` if the certificate is not trusted."""
    try:
        sock.settimeout(max(0.001, ends - time.monotonic()))
        context.sslsocket_class = TimedTlsSocket
        secure: Any = context.wrap_socket(sock, server_hostname=host)
        return secure
    except BaseException:
        sock.close()
        raise


def is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection can still be used. One that the server has closed, or has written to, is readable.

    It must not be used after False: a byte may have been taken from it.
    """
    sock.setblocking(False)
    try:
        sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    return False
