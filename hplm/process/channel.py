"""The messages between the model process that holds Triton's senders and the engine's process, over a socket pair.

Requests and answers are frames of bytes. The other messages are rare; both ends are ours and private, so they are pickled.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from hplm.location import Location
from hplm.metrics.meter import Series

DEVICE_FAILED = 70  # exit code of an engine whose device has a fault that stays
READ = 1 << 18  # bytes that are received at once
# Of a request: its number in the model process, its wanted outputs as bits, the client's name for it, its form.
Passed = tuple[int, int, str, bytearray]
_FRAME = struct.Struct("<Q?")  # bytes behind it, and whether they are pickled
_REQUEST = struct.Struct("<QIII")  # number in the model process, wanted outputs as bits, bytes of id and form


@dataclass(frozen=True)
class Apart:
    """To the engine: tenants that may have ended an engine."""

    alone: frozenset[int]  # uids of those whose texts run alone
    refused: frozenset[int]  # uids of those whose requests are refused


@dataclass(frozen=True)
class Begin:
    """To the engine, first: what to serve."""

    folder: Path  # of the backbone's version
    parameters: Mapping[str, str]  # of config.pbtxt
    state: Location | None
    apart: Apart


@dataclass(frozen=True)
class Ready:
    """From the engine, first. `failure`: why it cannot serve."""

    failure: str = ""


@dataclass(frozen=True)
class Beat:
    """From the engine, once a second: it lives, and this is what it has counted since the last beat."""

    counts: dict[Series, float]
    gauges: dict[Series, float]
    busy_s: float  # the longest time that a thread has been at one piece of work, counted in beats


@dataclass(frozen=True)
class Cancel:
    """To the engine of a decoder: nobody reads the answer to this request any more."""

    number: int  # in the model process


@dataclass(frozen=True)
class Shutdown:
    """To the engine: answer what waits, then end."""


def request_parts(number: int, wanted: int, id: str, form: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns the parts of the bytes of a request."""
    name = id.encode()
    return _REQUEST.pack(number, wanted, len(name), len(form)), name, form


def requests_in(frame: bytearray) -> Iterator[Passed]:
    """Yields what `request_parts` was given. Each form has memory of its own, so that none keeps the others'."""
    at = 0
    while at < len(frame):
        number, wanted, name, form = _REQUEST.unpack_from(frame, at)
        name += (begin := at + _REQUEST.size)
        at = name + form
        yield number, wanted, frame[begin:name].decode(), frame[name:at]


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()
        self._room = memoryview(bytearray(READ))  # kept: a new one for each read may take 20 us
        self._received = bytearray()  # of the next message
        self._messages: list[Any] = []
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: Begin | Ready | Apart | Beat | Cancel | Shutdown) -> None:
        """Raises OSError if the other end has gone."""
        self._send(True, [pickle.dumps(message, protocol=5)])

    def send_bytes(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Sends a frame. Raises OSError if the other end has gone."""
        self._send(False, parts)

    def _send(self, is_pickled: bool, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        frame = bytearray().join((bytes(_FRAME.size), *parts))
        _FRAME.pack_into(frame, 0, len(frame) - _FRAME.size, is_pickled)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self, wait_s: float = inf) -> Any | None:
        """Waits for a message, or for a frame, which is a bytearray. Returns None if none comes, or the other end has gone."""
        self._receive(wait_s)
        return self._messages.pop(0) if self._messages else None

    def arrived(self, wait_s: float = 0.0) -> list[Any]:
        """Returns the messages that are here. If there is none, waits for some at most so long.

        The last one is None if the other end has gone.
        """
        is_open = self._receive(wait_s)
        messages, self._messages = self._messages, []
        return messages if is_open else [*messages, None]

    def fileno(self) -> int:
        return self._socket.fileno()

    def _receive(self, wait_s: float) -> bool:
        """Waits for a whole message at most so long. Returns False when the other end has gone."""
        until = time.monotonic() + wait_s if wait_s else 0.0
        while not self._messages:
            if until:
                left_ms = 1000 * (until - time.monotonic())
                if not self._poll.poll(None if left_ms == inf else max(0.0, left_ms)):
                    return True
            try:
                count = self._socket.recv_into(self._room, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                count = 0
            if not count:
                return False
            self._received += self._room[:count]
            self._divide()
        return True

    def shut(self) -> None:
        """Lets both ends know that the other one has gone, also those that wait."""
        with contextlib.suppress(OSError):  # it has
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _divide(self) -> None:
        """Takes whole messages out of what was received."""
        at = 0
        while len(self._received) - at >= _FRAME.size:
            size, is_pickled = _FRAME.unpack_from(self._received, at)
            start = at + _FRAME.size
            if start + size > len(self._received):
                break
            at = start + size
            frame = self._received[start:at]
            self._messages.append(pickle.loads(frame) if is_pickled else frame)
        del self._received[:at]
