"""A request on its way through the engine: answered exactly once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hplm.engine.backbone import View
from hplm.tasks import Rows
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import Ticket

Respond = Callable[["list[Rows] | Exception"], None]


@dataclass(frozen=True)
class LookedUp:
    """A request as it comes from lookup."""

    ticket: Ticket
    addresses: np.ndarray  # texts x tokens, int64, padded with -1
    segments: np.ndarray
    spans: np.ndarray  # texts x rows x 3, padded with -1
    passages: Sequence[str] | None = None  # the texts' second segments, for tasks that answer from them
    id: str = ""  # as the client called it


@dataclass
class Trip:
    """When a request was where, in nanoseconds of the monotonic clock; 0: not there yet."""

    id: str
    arrival_ns: int
    deadline_ns: int  # 0: none
    taken_ns: int
    texts: int
    tokens: int = 0
    started_ns: int = 0  # its first batch
    computed_ns: int = 0  # its last one
    batch: int = 0  # the number of the last one


class Request:
    """Waits for all its texts; answers when the last is done, or fails with the first that fails."""

    def __init__(self, view: View, tenant: Tenant, texts: int, top_k: int, respond: Respond, trip: Trip | None = None) -> None:
        self.view = view  # held, so that what it consists of stays until the request is answered
        self.tenant = tenant
        self.trip = trip or Trip(id="", arrival_ns=0, deadline_ns=0, taken_ns=0, texts=texts)
        self.top_k = top_k
        self._respond = respond
        self._rows: list[Rows | None] = [None] * texts
        self._left = texts
        self._answered = False
        self._lock = threading.Lock()

    @property
    def answered(self) -> bool:
        return self._answered

    def done(self, index: int, rows: Rows) -> None:
        with self._lock:
            self._rows[index] = rows
            self._left -= 1
            if self._left or self._answered:
                return
            self._answered = True
        self._respond(self._rows)

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self._answered:
                return
            self._answered = True
        self._respond(error)


@dataclass(frozen=True, eq=False)
class Work:
    """One text of a request, as the engine needs it."""

    request: Request
    index: int
    addresses: np.ndarray  # int64, one a token
    segments: np.ndarray  # uint8
    spans: np.ndarray  # rows x 3, int32: token to read (-1: none), first and last code point it speaks of
    passage: str = ""  # that `spans` speak of, where the task answers from a pair

    @property
    def tokens(self) -> int:
        return len(self.addresses)

    @property
    def read(self) -> np.ndarray:
        """Rows that have a token to read. A text without any reads its first token, for its first row."""
        rows = np.flatnonzero(self.spans[:, 0] >= 0)
        return rows if len(rows) else np.zeros(1, dtype=np.int64)

    @property
    def bytes(self) -> int:
        return self.addresses.nbytes + self.segments.nbytes + self.spans.nbytes + sys.getsizeof(self.passage)
