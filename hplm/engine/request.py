"""A request and its texts on their way through the engine. A request is answered exactly once."""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.lookup.views import View
from hplm.process.in_flight import InFlightEntry
from hplm.request.answers import CONFIDENCE, AnswersOrError, names_of
from hplm.request.form import Form
from hplm.tasks.answers import Answers, TextAnswer
from hplm.tasks.tasks import windows_of
from hplm.tenants.embedding import MEAN
from hplm.tenants.exits import Exits
from hplm.tenants.snapshot import Tenant
from hplm.tenants.students import Team

log = logging.getLogger(__name__)


class EncoderRequest:
    """One request. It is answered when its last text is done, or fails with the first text that fails.

    Times are nanoseconds of the monotonic clock; 0 means not yet.
    """

    rung = 0  # of the plans of its exits, for its texts; 0: the dearest
    started_ns = 0  # when its first batch started
    computed_ns = 0  # when its last batch was computed
    batch = 0  # the number of its last batch
    answered = False
    _lock = threading.Lock()  # of all requests: it is held for moments

    def __init__(
        self,
        form: Form,
        view: View,
        tenant: Tenant,
        respond: Callable[[EncoderRequest, AnswersOrError], None],
        taken_ns: int = 0,
    ) -> None:
        self.form, self.head = form, form.head
        self.view = view  # keeps its tables open until the request is answered
        self.tenant = tenant
        self.top_k = self.head.top_k and min(self.head.top_k, len(tenant.labels))
        self.outputs = self.head.dimensions or tenant.outputs  # numbers in a row of its answer
        embedding = tenant.embedding  # None: heads answer
        self.is_normalised = embedding is not None and embedding.normalised
        self.is_pooled = embedding is not None and embedding.pooling == MEAN
        self.with_confidence = CONFIDENCE in names_of(form.wanted)
        self.calibration = tenant.calibration if self.with_confidence else None  # None: nobody asks how sure it is
        self.taken_ns = taken_ns
        self.texts = texts = form.texts
        self._respond = respond
        self._rows: list[TextAnswer | None] = [None] * texts
        self._computed: dict[int, dict[int, tuple[Array, Array]]] = {}  # logits and spans of windows or students, by text

    @property
    def in_flight_entry(self) -> bytes:
        """The bytes that name it while it is in a batch."""
        return InFlightEntry(self.form.number, self.tenant.uid, self.tenant.id).packed()

    @property
    def team(self) -> Team | None:
        """The students that answer it; None: the full stack does."""
        students = self.tenant.students
        return students.teams[self.rung] if students is not None else None

    def parts(self) -> list[Text]:
        """Returns the texts one by one, a long one window by window, or each once for each student that answers it.

        Only texts with passages have windows, and these are answered by no students. They read the form where it lies, and keep
        all of it in memory.
        """
        texts, team = self._parts(), self.team
        return texts if team is None else [one for text in texts for one in text.for_students(team)]

    def _parts(self) -> list[Text]:
        form = self.form
        reads_first = len(form.spans) == self.texts and not any(form.spans[:, 0].tolist())
        if self.texts == 1 and not form.passages:
            return [Text(self, 0, form.addresses, form.segments, form.spans, "", 0, 1, reads_first)]
        token = row = 0
        texts: list[Text] = []
        for index, (tokens, rows) in enumerate(zip(form.lengths, form.counts, strict=True)):
            addresses = form.addresses[token : token + tokens]
            segments = form.segments[token : token + tokens]
            spans = form.spans[row : row + rows]
            token, row = token + tokens, row + rows
            if not form.passages:
                texts.append(Text(self, index, addresses, segments, spans, reads_first=reads_first and rows == 1))
                continue
            windows = list(windows_of(spans, tokens))
            texts += [
                Text(self, index, addresses[at], segments[at], own, form.passages[index], number, len(windows))
                for number, (at, own) in enumerate(windows)
            ]
        return texts

    def joined(self, text: Text, logits: Array) -> tuple[Array, Array] | None:
        """Returns the logits and spans of all windows of a text, or the sum of its students' logits.

        None while others are still to be computed.
        """
        if text.windows == 1:
            return logits, text.spans
        with self._lock:
            computed = self._computed.setdefault(text.index, {})
            computed[text.window] = logits, text.spans
            if len(computed) < text.windows:
                return None
            del self._computed[text.index]
        parts = [computed[number] for number in range(text.windows)]
        if text.depth:
            return np.sum([own for own, _ in parts], axis=0), text.spans
        return np.concatenate([own for own, _ in parts]), np.concatenate([spans for _, spans in parts])

    def done(self, texts: Sequence[Text], answers: Answers) -> None:
        """Takes the answers to texts, in their order, and of each text the first one if there are several."""
        with self._lock:
            if self.answered:
                return
            if len(texts) < self.texts:  # they were not computed together
                for text, rows in zip(texts, answers, strict=True):
                    self._rows[text.index] = self._rows[text.index] or rows
                answers = [rows for rows in self._rows if rows is not None]
                if len(answers) < self.texts:
                    return
            self.answered = True
        self._leave(answers)

    def fail(self, error: Exception) -> None:
        """Answers with an error."""
        with self._lock:
            if self.answered:
                return
            self.answered = True
        self._leave(error)

    def _leave(self, answer: AnswersOrError) -> None:
        try:
            self._respond(self, answer)
        except Exception:  # others must still be answered
            log.exception("cannot send an answer")


FIRST = np.zeros(1, dtype=np.int64)
ROW_BYTES = 12  # of a span
TOKEN_BYTES = 9  # of an address and a segment


class Guess(NamedTuple):
    """Holds what a text would have answered at its exit."""

    confidence: float
    logits: Array  # answer rows x outputs


class Text:
    """One text of a request, a window of it, or a student's part of it.

    It waits in the queue (`hplm.scheduling.limits`); the engine computes it.
    """

    depth = 0  # the layers that it passes; 0: all
    is_pooled = False  # the mean of the rows that it reads is its one answer row
    guess: Guess | None = None  # of an audited text: its answer at the exit where it could have left

    def __init__(
        self,
        request: EncoderRequest,
        index: int,
        addresses: Array,
        segments: Array,
        spans: Array,
        passage: str = "",
        window: int = 0,
        windows: int = 1,
        reads_first: bool = False,
    ) -> None:
        """`spans` are answer rows x 3: token to read (-1: none), and the first and last code point that the row is about.

        `passage` is the text with these code points, if the task answers from a pair. `reads_first`: it is known that there is
        one row, which reads the first token.
        """
        self.request = request
        self.index = index
        self.addresses = addresses  # int64, one for each token
        self.segments = segments  # uint8
        self.spans = spans  # int32
        self.passage = passage
        self.window = window  # which of the text's windows or students it is
        self.windows = windows
        self.bytes = TOKEN_BYTES * len(addresses) + ROW_BYTES * len(spans)
        if passage:
            self.bytes += 2 * sys.getsizeof(passage) // windows  # once here, and once in the form
        head = request.head
        self.arrival_ns, self.deadline_ns, self.priority = head.arrival_ns, head.deadline_ns, head.priority
        self.tenant: int = request.tenant.uid
        self.slot_key, exits = request.tenant.weights, request.tenant.exits
        self.plan = exits.plans[request.rung] if exits is not None else None
        self.tokens = len(addresses)  # its expected work, in tokens that all layers compute
        if self.plan is not None:
            self.tokens = max(1, round(self.tokens * self.plan.cost))
        if request.is_pooled:
            self.is_pooled, self.is_one_row, self.read, self.reading = True, True, FIRST, np.arange(len(addresses))
            return
        if reads_first:
            self.is_one_row, self.read, self.reading = True, FIRST, FIRST
            return
        self.is_one_row = len(spans) == 1 and bool(spans[0, 0] >= 0)
        rows = np.flatnonzero(spans[:, 0] >= 0)
        # A text without a token that is read reads its first token, for its first row.
        self.read = rows if len(rows) else FIRST  # the rows that read a token
        self.reading = spans[rows, 0] if len(rows) else FIRST  # the token that each of them reads, or all that are pooled

    def for_students(self, team: Team) -> list[Text]:
        """Returns it once for each student that is asked. They are computed like windows, and their logits are added."""
        one, students = copy.copy(self), self.request.tenant.students
        assert students is not None  # it has a team of them
        one.plan, one.depth, one.windows = None, students.depth, team.members
        one.tokens, one.bytes = team.part(len(self.addresses), self.bytes)
        found: list[Text] = [copy.copy(one) for _ in range(team.members)]
        for number, own in enumerate(found):
            own.slot_key, own.window = self.request.tenant.student_weights[number], number
        return found

    @property
    def exits(self) -> Exits:
        """The exits of its tenant, which has some."""
        exits = self.request.tenant.exits
        assert exits is not None
        return exits

    @property
    def exit(self) -> int:
        """The exit where it may leave; -1: it may not."""
        return -1 if self.plan is None or self.plan.exit is None else self.plan.exit

    def rows(self, logits: Array, outputs: int) -> Array:
        """Returns logits with a row for each of its spans: zeros for rows without a token."""
        rows = np.zeros((len(self.spans), outputs), dtype=logits.dtype)
        rows[self.read] = logits[:, :outputs]
        return rows
