"""One keep-alive connection and the request under way on it, with as little HTTP as counting answers takes."""

from __future__ import annotations

import socket

CHUNK = 1 << 16
LONGEST_HEAD = 1 << 16
LENGTH = b"\r\ncontent-length:"


class BadAnswer(Exception):
    """Not the HTTP/1.1 with a Content-Length that Triton answers a POST with."""


class Connection:
    __slots__ = ("answer", "body_at", "closes", "due", "expected", "number", "sent_at", "socket", "status", "unsent")

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.socket = socket.create_connection((host, port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.closes = False  # the server has said that it will not take another request
        self.clear()

    def fileno(self) -> int:
        return self.socket.fileno()

    def clear(self) -> None:
        self.number = -1  # of the request under way; -1 while idle
        self.due = self.sent_at = 0.0
        self.unsent = self.answer = b""
        self.expected = -1  # length of the whole answer, once its head is there

    def begin(self, number: int, request: bytes, due: float, now: float) -> None:
        self.number, self.unsent, self.due, self.sent_at = number, request, due, now

    def flush(self) -> bool:
        """Sends what the socket takes; whether that was all."""
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            return False
        self.unsent = self.unsent[sent:]
        return not self.unsent

    def receive(self) -> bool:
        """Takes what has arrived; whether the answer is whole."""
        try:
            piece = self.socket.recv(CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            raise ConnectionResetError("closed by the server")
        if self.number < 0:
            raise BadAnswer("an answer that nothing was asked for")
        self.answer += piece
        if self.expected < 0:
            self._read_head()
        if 0 <= self.expected < len(self.answer):
            raise BadAnswer("more bytes than announced")
        return len(self.answer) == self.expected

    def body(self) -> bytes:
        return self.answer[self.body_at :]

    def _read_head(self) -> None:
        end = self.answer.find(b"\r\n\r\n")
        if end < 0:
            if len(self.answer) > LONGEST_HEAD:
                raise BadAnswer("a head without an end")
            return
        head = self.answer[: end + 2].lower()
        length_at = head.find(LENGTH)
        if length_at < 0 or not head.startswith(b"http/1.1 "):
            raise BadAnswer("no HTTP/1.1 answer with a Content-Length")
        length_at += len(LENGTH)
        try:
            self.status = int(head[9:12])
            length = int(head[length_at : head.index(b"\r\n", length_at)])
        except ValueError as error:
            raise BadAnswer("a head with broken numbers") from error
        self.closes = b"\r\nconnection: close\r\n" in head
        self.body_at = end + 4
        self.expected = self.body_at + length
