"""The messages between the model process that holds Triton's senders and the engine's process, over a socket pair.

Both ends are ours and private, so messages are pickled.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hplm.arrays import Array
from hplm.engine.looked_up import LookedUp
from hplm.metrics.meter import Series
from hplm.tenants.ticket import Ticket

Outputs = dict[str, Array]  # by name on the wire
Failure = tuple[str, str]  # the status, and the message for the wire


@dataclass(frozen=True)
class Begin:
    """To the engine, first: what to serve."""

    folder: Path
    parameters: Mapping[str, str]  # of config.pbtxt
    state: Path | None


@dataclass(frozen=True)
class Ready:
    """From the engine, first. `failure`: why it cannot serve."""

    failure: str = ""


@dataclass(frozen=True)
class Ask:
    """To the engine: a looked-up request with a valid ticket."""

    number: int  # of the request, in the model process
    ticket: Ticket
    looked_up: LookedUp
    passages: list[str] | None
    id: str  # the client's name for it
    wanted: frozenset[str]  # outputs


@dataclass(frozen=True)
class Reply:
    """From the engine: the answer to a request."""

    number: int
    answer: Outputs | Failure
    counted: tuple[Series, ...] = ()  # where it is counted already, if it may yet be refused: it needs shared memory


@dataclass(frozen=True)
class Beat:
    """From the engine, once a second: it lives, and this is what it has counted since the last beat."""

    counts: dict[Series, float]
    levels: dict[Series, float]
    busiest: frozenset[str]  # tenants with series of their own
    computing_s: float  # how long the current batch has been computing


@dataclass(frozen=True)
class End:
    """To the engine: answer what waits, then end."""


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, descriptor: int) -> None:
        self._connection: Connection[Any, Any] = Connection(descriptor)
        self._sending = threading.Lock()

    def send(self, message: Begin | Ready | Ask | Reply | Beat | End) -> None:
        """Raises OSError if the other end has gone."""
        pickled = pickle.dumps(message, protocol=5)
        with self._sending:
            self._connection.send_bytes(pickled)

    def receive(self) -> Any | None:
        """Waits for a message. Returns None when the other end has gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None

    @property
    def waits(self) -> bool:
        """Whether another message has already arrived."""
        return self._connection.poll(0)

    def close(self) -> None:
        self._connection.close()
