"""One keep-alive connection with at most one request in flight. It reads only as much HTTP as counting answers needs."""

from __future__ import annotations

import re
import socket
import ssl

CHUNK = 1 << 16
LONGEST_HEAD = 1 << 16
HEAD = re.compile(rb"http/1\.1 ([0-9]{3})\b.*?\r\n(?:content-length: *([0-9]+)|transfer-encoding: *chunked)\r\n", re.DOTALL)
CHUNKED, LAST = -2, b"\r\n0\r\n\r\n"  # the length of an answer in chunks, as a decoder's, and how it ends
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BadAnswer(Exception):
    """The answer is not HTTP/1.1 with a Content-Length or in chunks, as Triton sends it."""


class Connection:
    __slots__ = ("answer", "body_at", "closes", "due", "expected", "number", "sent_at", "socket", "status", "unsent")

    def __init__(self, address: str, timeout: float, source: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout, None if source is None else (source, 0))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
        self.socket.setblocking(False)
        self.closes = False  # the server has announced that it will close the connection
        self.clear()

    def fileno(self) -> int:
        return self.socket.fileno()

    def clear(self) -> None:
        self.number = -1  # of the request in flight; -1: idle
        self.due = self.sent_at = 0.0
        self.unsent = self.answer = b""
        self.expected = -1  # length of the whole answer; -1: its head has not arrived

    def begin(self, number: int, request: bytes, due: float, now: float) -> None:
        self.number, self.unsent, self.due, self.sent_at = number, request, due, now

    def flush(self) -> bool:
        """Sends as much as the socket takes. Returns whether everything is sent."""
        try:
            sent = self.socket.send(self.unsent)
        except NOT_YET:
            return False
        self.unsent = self.unsent[sent:]
        return not self.unsent

    def receive(self) -> bool:
        """Reads the bytes that have arrived. Returns whether the answer is complete."""
        try:
            piece = self.socket.recv(CHUNK)
        except NOT_YET:
            return False
        if not piece:
            raise ConnectionResetError("closed by the server")
        if self.number < 0:
            raise BadAnswer("an answer without a request")
        self.answer += piece
        if self.expected == -1:
            self._read_head()
        if self.expected == CHUNKED and (end := self.answer.find(LAST)) >= 0:
            self.expected = end + len(LAST)
        if 0 <= self.expected < len(self.answer):
            raise BadAnswer("more bytes than announced")
        return len(self.answer) == self.expected

    def body(self) -> bytes:
        """Returns what came behind the head. Chunks keep their lengths."""
        return self.answer[self.body_at :]

    def _read_head(self) -> None:
        end = self.answer.find(b"\r\n\r\n")
        if end < 0:
            if len(self.answer) > LONGEST_HEAD:
                raise BadAnswer("a head without an end")
            return
        head = self.answer[: end + 2].lower()
        found = HEAD.match(head)
        if found is None:
            raise BadAnswer("no HTTP/1.1 answer with a Content-Length or in chunks")
        self.status = int(found[1])
        self.closes = b"\r\nconnection: close\r\n" in head
        self.body_at = end + 4
        self.expected = CHUNKED if found[2] is None else self.body_at + int(found[2])
