"""A request and its texts on their way through the engine. A request is answered exactly once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hplm.adapters.bank import Record
from hplm.arrays import Array
from hplm.engine.backbone import View
from hplm.engine.looked_up import LookedUp
from hplm.errors import DeadlineMissed
from hplm.tasks import TextAnswer, windows_of
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import Ticket

Answer = list[TextAnswer] | Exception


class Request:
    """One request. It is answered when its last text is done, or fails with the first text that fails.

    Times are nanoseconds of the monotonic clock; 0 means not yet.
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
        self.id = id  # the client's name for it
        self.view = view  # keeps its tables and banks open until the request is answered
        self.tenant = tenant
        self.top_k = min(ticket.top_k, len(tenant.labels))
        self.priority = ticket.priority
        self.arrival_ns = ticket.arrival_ns
        self.deadline_ns = ticket.deadline_ns  # 0: no deadline
        self.taken_ns = taken_ns
        self.started_ns = 0  # when its first batch started
        self.computed_ns = 0  # when its last batch was computed
        self.batch = 0  # the number of its last batch
        self.texts = texts
        self.tokens = 0  # of all texts, after they were checked
        self._respond = respond
        self._rows: list[TextAnswer | None] = [None] * texts
        self._computed: dict[int, dict[int, tuple[Array, Array]]] = {}  # logits and spans of windows, by text
        self._left = texts
        self._answered = False
        self._lock = threading.Lock()

    @property
    def answered(self) -> bool:
        return self._answered

    def texts_from(self, looked_up: LookedUp, passages: Sequence[str] | None = None) -> list[Text]:
        """Returns the looked-up texts one by one, a long one window by window.

        `passages` are for tasks that answer from a pair. Only these have windows.
        """
        if passages is None:
            return [Text(self, i, *looked_up.text(i)) for i in range(self.texts)]
        found: list[Text] = []
        for i, passage in enumerate(passages):
            addresses, segments, spans = looked_up.text(i)
            windows = list(windows_of(spans, len(addresses)))
            found += [
                Text(self, i, addresses[at], segments[at], own, passage, number, len(windows))
                for number, (at, own) in enumerate(windows)
            ]
        return found

    def joined(self, text: Text, logits: Array) -> tuple[Array, Array] | None:
        """Returns the logits and spans of all windows of a text. None while others are still to be computed."""
        if text.windows == 1:
            return logits, text.spans
        with self._lock:
            computed = self._computed.setdefault(text.index, {})
            computed[text.window] = logits, text.spans
            if len(computed) < text.windows:
                return None
            del self._computed[text.index]
        parts = [computed[number] for number in range(text.windows)]
        return np.concatenate([own for own, _ in parts]), np.concatenate([spans for _, spans in parts])

    def done(self, index: int, rows: TextAnswer) -> None:
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
    """One text of a request, or a window of it. It waits in the queue (`hplm.scheduling.waiting`); the engine computes it."""

    request: Request
    index: int
    addresses: Array  # int64, one for each token
    segments: Array  # uint8
    spans: Array  # rows x 3, int32: token to read (-1: none), and the first and last code point that the row is about
    passage: str = ""  # the text with these code points, if the task answers from a pair
    window: int = 0  # which of the text's windows it is
    windows: int = 1

    @property
    def tokens(self) -> int:
        return len(self.addresses)

    @property
    def bytes(self) -> int:
        return self.addresses.nbytes + self.segments.nbytes + self.spans.nbytes + sys.getsizeof(self.passage) // self.windows

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
    def read(self) -> Array:
        """The rows that have a token to read. A text without such rows reads its first token, for its first row."""
        rows = np.flatnonzero(self.spans[:, 0] >= 0)
        return rows if len(rows) else np.zeros(1, dtype=np.int64)


def deadline_missed(arrival_ns: int, deadline_ns: int) -> DeadlineMissed:
    """Returns the error for a request that will not be answered in time."""
    allowed = (deadline_ns - arrival_ns) / 1e6
    return DeadlineMissed(
        f"the request cannot be answered within the {allowed:g} ms that it allowed: allow more time, or send fewer texts"
    )
