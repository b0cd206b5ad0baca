"""The messages between the model process that holds Triton's senders and the engine's process, over a socket pair.

Both ends are ours and private, so messages are pickled.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hplm.arrays import Array
from hplm.metrics.meter import Counted, Series

Outputs = dict[str, Array]  # by name on the wire
Failure = tuple[str, str]  # the status, and the message for the wire
DEVICE_FAILED = 70  # exit code of an engine whose device has a fault that stays
READ = 1 << 18  # bytes that are received at once
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True)
class Apart:
    """To the engine: tenants that may have ended an engine."""

    alone: frozenset[int]  # numbers of those whose texts run alone
    quarantined: tuple[frozenset[str], ...]  # ids of those whose requests are refused, by backbone


@dataclass(frozen=True)
class Begin:
    """To the engine, first: what to serve."""

    folders: Sequence[Path]  # of the backbones' versions, in the order in which the parameters name them
    parameters: Mapping[str, str]  # of config.pbtxt
    state: Path | None
    apart: Apart


@dataclass(frozen=True)
class Ready:
    """From the engine, first. `failure`: why it cannot serve."""

    failure: str = ""


class Ask(NamedTuple):
    """A looked-up request."""

    number: int  # of the request, in the model process
    signed: bytes  # a valid ticket and what was looked up
    id: str  # the client's name for it
    wanted: frozenset[str]  # outputs
    backbone: int = 0  # whose lookup has signed the ticket


@dataclass(frozen=True)
class Asks:
    """To the engine: requests."""

    asks: list[Ask]


class Reply(NamedTuple):
    """The answers to requests that have the same outputs in the same shape, or the failure of one."""

    numbers: list[int]  # of the requests
    texts: list[int]  # of each request
    answer: Outputs | Failure  # outputs: of all texts, end to end
    counted: list[Counted]  # of each request, where it is counted; empty if sending the answers cannot change it
    deadlines_ns: list[int]  # of each request, 0: none; empty likewise


@dataclass(frozen=True)
class Replies:
    """From the engine: answers."""

    replies: list[Reply]


class Beaten(NamedTuple):
    """The counts of one backbone since the last beat."""

    counts: dict[Series, float]
    levels: dict[Series, float]
    busiest: frozenset[str]  # tenants with series of their own


@dataclass(frozen=True)
class Beat:
    """From the engine, once a second: it lives, and this is what it has counted."""

    backbones: list[Beaten]
    computing_s: float  # how long a thread has been preparing or computing a batch


@dataclass(frozen=True)
class End:
    """To the engine: answer what waits, then end."""


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._sending = threading.Lock()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: Begin | Ready | Apart | Asks | Replies | Beat | End) -> None:
        """Raises OSError if the other end has gone."""
        pickled = pickle.dumps(message, protocol=5)
        with self._sending:
            self._socket.sendall(_SIZE.pack(len(pickled)) + pickled)

    def receive(self) -> Any | None:
        """Waits for a message. Returns None when the other end has gone."""
        while (end := self._end()) > len(self._received):
            if not self._receive_more():
                return None
        return self._take(end)

    def arrived(self) -> list[Any]:
        """Returns the messages that are here, without waiting. The last one is None if the other end has gone."""
        messages: list[Any] = []
        try:
            more = self._socket.recv(READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return messages
        except OSError:
            more = b""
        self._received += more
        while (end := self._end()) <= len(self._received):
            messages.append(self._take(end))
        return messages if more else [*messages, None]

    def fileno(self) -> int:
        return self._socket.fileno()

    def comes(self, seconds: float = 0.0) -> bool:
        """Waits for a message at most so long. Returns whether `receive` returns at once."""
        until = time.monotonic() + seconds
        while self._end() > len(self._received):
            if not self._poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
                return False
            if not self._receive_more():
                return True
        return True

    def _receive_more(self) -> bool:
        """Returns False when the other end has gone."""
        try:
            more = self._socket.recv(READ)
        except OSError:
            return False
        self._received += more
        return bool(more)

    def shut(self) -> None:
        """Lets both ends know that the other one has gone, also those that wait."""
        with contextlib.suppress(OSError):  # it has
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _take(self, end: int) -> Any:
        message = pickle.loads(memoryview(self._received)[_SIZE.size : end])
        del self._received[:end]
        return message

    def _end(self) -> int:
        """Returns where the first message ends in what was received."""
        size = _SIZE.size
        return size + _SIZE.unpack_from(self._received)[0] if len(self._received) >= size else size
