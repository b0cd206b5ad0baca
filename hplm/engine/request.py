"""A request and its texts on their way through the engine. A request is answered exactly once.

A text is computed at the steps of a plan, one after the other, until an answer is sure enough. Meanwhile it has the answer so
far in hand, which is its answer if anything goes wrong.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hplm.adapters.record import Record
from hplm.arrays import Array
from hplm.engine.in_flight import Mark, number_of
from hplm.engine.looked_up import LookedUp
from hplm.engine.views import View
from hplm.levels.calibration import Calibration
from hplm.levels.dispatch import draw
from hplm.levels.plan import Plan
from hplm.levels.pruning import runs_of
from hplm.tasks import TextAnswer, windows_of
from hplm.tenants.level import FULL
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import ARRIVES, Ticket

Answer = list[TextAnswer] | Exception
WHOLE: Mapping[str, float] = MappingProxyType({FULL: 1.0})  # of a backbone without other stacks


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
        with_confidence: bool = False,
        shares: Mapping[str, float] = WHOLE,
        backbone: int = 0,
        number: int = 0,
    ) -> None:
        """`shares`: of the full stack's work that each stack takes. `backbone`: its number in the engine. `number`: the
        request's own, in the model process.
        """
        self.id = id  # the client's name for it
        self.view = view  # keeps its tables and banks open until the request is answered
        self.tenant = tenant
        self.backbone = backbone
        self.tenant_number = number_of(backbone, tenant.uid)
        self.mark = Mark(number, self.tenant_number, tenant.id).packed()
        self.top_k = min(ticket.top_k, len(tenant.labels))
        self.with_confidence = with_confidence
        self.plan: Plan = tenant.plans[0]  # of its texts, unless another one is set before they are made
        self.shares = shares
        self.priority = ticket.priority
        self.is_by_link = ticket.across == ARRIVES
        self.arrival_ns = ticket.arrival_ns
        self.received_ns = ticket.received_ns
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

    def texts_from(self, looked_up: LookedUp) -> list[Text]:
        """Returns the looked-up texts one by one, a long one window by window. Only texts with passages have windows."""
        if self.texts == 1 and not looked_up.passages:
            alone = looked_up.addresses, looked_up.segments, looked_up.spans
            return [Text(self, 0, *alone, words=looked_up.words, places=looked_up.places)]
        token = row = 0
        texts: list[Text] = []
        for index, (tokens, rows) in enumerate(zip(looked_up.lengths.tolist(), looked_up.counts.tolist(), strict=True)):
            # Copies: a waiting text keeps only its own part of the request in memory.
            addresses = looked_up.addresses[token : token + tokens].copy()
            segments = looked_up.segments[token : token + tokens].copy()
            spans = looked_up.spans[row : row + rows].copy()
            words = looked_up.words[token : token + tokens].copy() if looked_up.words is not None else None
            places = looked_up.places[token : token + tokens].copy() if looked_up.places is not None else None
            token, row = token + tokens, row + rows
            if not looked_up.passages:
                texts.append(Text(self, index, addresses, segments, spans, words=words, places=places))
                continue
            windows = list(windows_of(spans, tokens))
            texts += [
                Text(self, index, addresses[at], segments[at], own, looked_up.passages[index], number, len(windows))
                for number, (at, own) in enumerate(windows)
            ]
        return texts

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
        """Takes a text's answer, the first one if there are several."""
        with self._lock:
            if self._rows[index] is not None:
                return
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


FIRST = np.zeros(1, dtype=np.int64)
WHOLE_TEXT = "[]"  # no words are left out


class InHand(NamedTuple):
    """The answer to a text that the steps so far have made together."""

    answer: TextAnswer
    logits: Array  # rows x labels, with zeros in rows without a token

    def apart(self) -> InHand:
        """Returns it without the numbers of other texts, of which its own may be a part in memory."""
        answer = self.answer
        own = {"scores": answer.scores.copy(), "logits": answer.logits.copy(), "spans": answer.spans.copy()}
        return InHand(replace(answer, **own), self.logits.copy())

    @property
    def bytes(self) -> int:
        return self.logits.nbytes + self.answer.logits.nbytes + self.answer.scores.nbytes + self.answer.spans.nbytes


class Text:
    """One text of a request, or a window of it. It waits in the queue (`hplm.scheduling.waiting`); the engine computes it."""

    __slots__ = (
        *("addresses", "arrival_ns", "backbone", "bytes", "deadline_ns", "draw", "in_hand", "index", "is_one_row", "kept"),
        *("level", "passage", "places", "priority", "read", "reading", "request", "segments", "slot_key", "spans", "step"),
        *("tenant", "tokens", "window", "windows", "words"),
    )

    def __init__(
        self,
        request: Request,
        index: int,
        addresses: Array,
        segments: Array,
        spans: Array,
        passage: str = "",
        window: int = 0,
        windows: int = 1,
        words: Array | None = None,
        places: Array | None = None,
    ) -> None:
        """`spans` are answer rows x 3: token to read (-1: none), and the first and last code point that the row is about.

        `passage` is the text with these code points, if the task answers from a pair. `words`, `places`: see
        `LookedUp`.
        """
        self.request = request
        self.index = index
        self.addresses = addresses  # int64, one for each token
        self.segments = segments  # uint8
        self.kept: Array | None = None  # the tokens that the layers compute; None: all
        self.words = words
        self.places = places  # of all tokens, also of those that are not kept
        self.spans = spans  # int32
        self.passage = passage
        self.window = window  # which of the text's windows it is
        self.windows = windows
        of_words = sum(part.nbytes for part in (words, places) if part is not None)
        self.bytes = addresses.nbytes + segments.nbytes + spans.nbytes + of_words + sys.getsizeof(passage) // windows
        self.arrival_ns = request.arrival_ns
        self.deadline_ns = request.deadline_ns
        self.priority = request.priority
        self.tenant: int = request.tenant_number
        self.backbone = request.backbone
        self.in_hand: InHand | None = None
        steps = len(request.plan.steps)
        # A text in windows has one answer from all of them, which would have to go on together: it goes to the last step.
        self._stand_at(0 if windows == 1 else steps - 1)
        self.is_one_row = len(spans) == 1 and bool(spans[0, 0] >= 0)
        if self.is_one_row and not spans[0, 0]:
            self.read, self.reading = FIRST, FIRST
            return
        rows = np.flatnonzero(spans[:, 0] >= 0)
        # A text without a token that is read reads its first token, for its first row.
        self.read = rows if len(rows) else FIRST  # the rows that read a token
        self.reading = spans[rows, 0] if len(rows) else FIRST  # the token that each of them reads

    def _stand_at(self, step: int) -> None:
        request = self.request
        self.step = step
        self.draw = 0.0 if self.is_at_end else draw(self.addresses, request.tenant.version, step)
        self.level = request.tenant.all_levels[request.plan.steps[step].level]
        self.slot_key: tuple[Record, Record | None] = self.level.head, self.level.adapter
        self.tokens = max(1, round(self.length * request.shares[self.level.stack]))  # of the full stack's work

    def further_records(self) -> list[Record]:
        """Returns the records of levels that it may reach after its own, in this backbone."""
        levels, steps = self.request.tenant.all_levels, self.request.plan.steps[self.step + 1 :]
        return [record for step in steps if step.level < len(levels) for record in levels[step.level].records()]

    @property
    def length(self) -> int:
        """The tokens that the layers compute."""
        return len(self.addresses) if self.kept is None else len(self.kept)

    @property
    def is_at_end(self) -> bool:
        """Whether its next answer is its last."""
        return self.step == len(self.request.plan.steps) - 1

    @property
    def leaves_next(self) -> bool:
        """Whether its next step is in another backbone."""
        return not self.is_at_end and self.request.plan.steps[self.step + 1].level == len(self.request.tenant.all_levels)

    @property
    def weight(self) -> float:
        """The weight of this step's answer beside that of the steps before."""
        return self.request.plan.steps[self.step].weight

    @property
    def is_watched(self) -> bool:
        """Whether it matters how much attention its tokens receive."""
        return self.words is not None and not self.is_at_end and self.request.plan.steps[self.step].alpha > 0

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of its answer; None if nobody asks how sure this is."""
        return self.level.calibration if self.request.with_confidence or not self.is_at_end else None

    def go_on(self, in_hand: InHand, kept: Array | None = None) -> None:
        """Moves to its next step. `kept`: of the tokens that were computed, a bool for each; special ones are always kept.

        All rows are still gathered, because those of a token's neighbours hold a part of its vector.
        """
        before, self.in_hand = self.in_hand, in_hand.apart()
        if kept is not None and self.words is not None and not kept.all():
            self.kept = np.flatnonzero(kept) if self.kept is None else self.kept[kept]
            self.words = self.words[kept]
        self.bytes += self.in_hand.bytes - (before.bytes if before is not None else 0)
        self._stand_at(self.step + 1)

    def onward(self, kept: Array | None = None) -> str:
        """Returns what another backbone is to read of it: WHOLE_TEXT, or the code points of words, in runs.

        `kept`: see `go_on`.
        """
        words, places = self.words, self.places
        if words is None or places is None:
            return WHOLE_TEXT
        if self.kept is not None:
            places = places[self.kept]
        if kept is not None:
            words, places = words[kept], places[kept]
        return json.dumps(runs_of(words, places)) if len(words) < len(self.addresses) else WHOLE_TEXT
