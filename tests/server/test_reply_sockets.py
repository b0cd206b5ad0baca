"""Answers wait inside Triton in the buffers of Unix sockets, and those that find no room there are lost."""

import json
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hplm.server import reply_sockets
from loadtest.encode import infer_request
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

REQUESTS = 500  # Triton's own buffers have room for 278
NUMBERS = 10_000_000  # of a request that keeps Triton's thread for some tenths of a second


def test_buffers_that_cannot_be_widened_are_logged_with_the_way_out(caplog):
    with subprocess.Popen(["true"]) as ended:
        pass
    reply_sockets.widen(ended.pid)
    assert mentions(caplog.text, "net.core.wmem_default", reply_sockets.ROOM)


@pytest.mark.slow
@pytest.mark.server("toy")
def test_every_request_is_answered_although_the_thread_that_sends_answers_is_busy(server):
    """Nearly all connections have the same thread. While it reads a large request, the answers to all others arrive."""
    asked = infer_request("toy", ["the"], "nobody")
    large = large_request()
    host, _, port = server.http_url.rpartition(":")

    def connected() -> socket.socket:
        """A thread that does nothing gets the connection, and the first one is asked first."""
        connection = socket.create_connection((host, int(port)))
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")  # its thread has nothing to do again
        return connection

    first, second, *others = (connected() for _ in range(REQUESTS + 2))
    for connection in (first, second):
        connection.sendall(large[:-1])
    eventually(lambda: not unread(int(port)))
    first.sendall(large[-1:])
    for connection in others:
        connection.sendall(asked)
    second.sendall(large[-1:])
    assert Counter(answers([first, second, *others])) == {404: REQUESTS, 400: 2}


def unread(port: int) -> int:
    """Returns the bytes on their way to a port of this machine, and the connections to it that nobody has accepted."""
    found = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        leaves, comes = (int(queue, 16) for queue in queues.split(":"))
        found += comes * local.endswith(f":{port:04X}") + leaves * remote.endswith(f":{port:04X}")
    return found


def large_request() -> bytes:
    tensor = {"name": "TEXT", "shape": [1, NUMBERS], "datatype": "INT32", "data": []}
    head, tail = json.dumps({"inputs": [tensor]}).split("[]")
    body = f"{head}[{'1,' * (NUMBERS - 1)}1]{tail}".encode()
    return b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def answers(connections: list[socket.socket]) -> Iterator[int]:
    """Yields the statuses of the answers. One that is lost is an error."""
    for connection in connections:
        with connection:
            connection.settimeout(PATIENCE)
            yield int(connection.recv(1 << 16)[9:12])
