"""Answers wait inside Triton in the buffers of Unix sockets, and those that find no room there are lost."""

import json
import selectors
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from hplm.server import reply_sockets
from loadtest.encode import infer_request
from tests.support.message import mentions
from tests.support.wait import eventually

# Triton's pair: messages of 17 bytes, and a writer that does not wait.
PAIR = """
import socket
ours, its = socket.socketpair()
ours.setblocking(False)
print(flush=True)
input()
sent = 0
try:
    while sent < 5000:
        sent += ours.send(bytes(17)) // 17
except BlockingIOError:
    pass
print(sent)
"""
REQUESTS = 500  # Triton's own buffers have room for 278
NUMBERS = 10_000_000  # of a request that keeps Triton's thread for some tenths of a second


def room(meanwhile: Callable[[int], None]) -> int:
    """Returns how many messages a process may send that the other end does not read. `meanwhile` gets its id before."""
    with subprocess.Popen([sys.executable, "-c", PAIR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        meanwhile(process.pid)
        return int(process.communicate("\n")[0])


def test_more_answers_find_room_in_widened_buffers():
    assert room(reply_sockets.widen) > 1.5 * room(lambda pid: None)


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
    assert answers([first, second, *others]) == {404: REQUESTS, 400: 2}


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


def answers(connections: list[socket.socket]) -> Counter[int]:
    """Returns the statuses of the answers that come until none has come for ten seconds."""
    statuses: Counter[int] = Counter()
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map() and (ready := selector.select(10)):
            for key, _ in ready:
                connection = cast(socket.socket, key.fileobj)
                statuses[int(connection.recv(1 << 16)[9:12])] += 1
                selector.unregister(connection)
                connection.close()
    return statuses
