"""A request and its texts on their way through the engine: answered exactly once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hplm.adapters.bank import Record
from hplm.engine.backbone import View
from hplm.engine.lookup import LookedUp
from hplm.tasks import Rows
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import Ticket

Answer = list[Rows] | Exception


class Request:
    """Waits for all its texts; answers when the last is done, or fails with the first that fails.

    Times are nanoseconds of the monotonic clock; 0: not there yet.
    """

    def __init__(
        self,
        ticket: Ticket,
        view: View,
        tenant: Tenant,
        texts: int,
        respond: Callable[[Request, Answer], None],
        id: str = "",
        taken_ns: int = 0,
    ) -> None:
        self.id = id  # as the client called it
        self.view = view  # held, so that what it consists of stays until the request is answered
        self.tenant = tenant
        self.top_k = min(ticket.top_k, len(tenant.labels))
        self.priority = ticket.priority
        self.arrival_ns = ticket.arrival_ns
        self.deadline_ns = ticket.deadline_ns  # 0: none
        self.taken_ns = taken_ns
        self.started_ns = 0  # its first batch
        self.computed_ns = 0  # its last batch
        self.batch = 0  # the number of its last batch
        self.texts = texts
        self.tokens = 0  # of all texts, once they are checked
        self._respond = respond
        self._rows: list[Rows | None] = [None] * texts
        self._left = texts
        self._answered = False
        self._lock = threading.Lock()

    @property
    def answered(self) -> bool:
        return self._answered

    def texts_from(self, looked_up: LookedUp, passages: Sequence[str] | None = None) -> list[Text]:
        """What lookup found, text by text. `passages`: what the spans of the task `span` speak of."""
        return [Text(self, i, *looked_up.text(i), passages[i] if passages is not None else "") for i in range(self.texts)]

    def done(self, index: int, rows: Rows) -> None:
        with self._lock:
            self._rows[index] = rows
            self._left -= 1
            if self._left or self._answered:
                return
            self._answered = True
        self._respond(self, [rows for rows in self._rows if rows is not None])

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self._answered:
                return
            self._answered = True
        self._respond(self, error)


@dataclass(frozen=True, eq=False)
class Text:
    """One text of a request: what waits in line (`hplm.scheduling.waiting`) and what the engine computes."""

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
    def bytes(self) -> int:
        return self.addresses.nbytes + self.segments.nbytes + self.spans.nbytes + sys.getsizeof(self.passage)

    @property
    def arrival_ns(self) -> int:
        return self.request.arrival_ns

    @property
    def deadline_ns(self) -> int:
        return self.request.deadline_ns

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def slot_key(self) -> tuple[Record, Record | None]:
        return self.request.tenant.head, self.request.tenant.adapter

    @property
    def tenant(self) -> int:
        return self.request.tenant.uid

    @property
    def read(self) -> np.ndarray:
        """Rows that have a token to read. A text without any reads its first token, for its first row."""
        rows = np.flatnonzero(self.spans[:, 0] >= 0)
        return rows if len(rows) else np.zeros(1, dtype=np.int64)
