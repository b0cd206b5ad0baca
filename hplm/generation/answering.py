"""The answers of running sequences: what is said of their tokens, and how each request ends, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from hplm.errors import Broken, HplmError
from hplm.generation.request import DEADLINE, LENGTH, AnswerPart, DecoderRequest, Sequence, Token
from hplm.generation.running import Planned, RunningSequences
from hplm.generation.staging import Staged
from hplm.metrics.meter import Meter
from hplm.metrics.names import FIRST_TOKEN_SECONDS, TOKEN_SECONDS

log = logging.getLogger(__name__)


class Staging(Protocol):
    def stage(self, planned: Many[Planned], broken: Callable[[Sequence, HplmError], None]) -> Staged | None: ...
    def hold(self, sequence: Sequence) -> None: ...
    def release(self, sequence: Sequence) -> None: ...


@dataclass
class SequenceAnswers:
    """Whoever calls it has the lock of the loop, but for `fail` and `broken`."""

    _running: RunningSequences
    _stager: Staging
    _end_ids: Many[int]
    _meter: Meter  # counts the times of tokens
    _lock: threading.RLock
    _first_tokens: list[float] = field(default_factory=list[float])  # of this step: the seconds since their requests arrived
    _next_tokens: list[float] = field(default_factory=list[float])  # of this step: the seconds since the tokens before them

    def broken(self, sequence: Sequence, error: HplmError) -> None:
        failure = type(error)(f"tenant {sequence.request.tenant.id!r}: {error}")
        log.error("%s", failure)
        self.fail(sequence.request, failure)

    def took(self, sequence: Sequence, token: Token, now: int) -> None:
        """Adds a token to an answer, and says what may be said of it."""
        request = sequence.request
        if request.ended:  # with another of its answers
            return
        if token.id < 0:
            self.fail(request, Broken(f"tenant {request.tenant.id!r}: its logits are not numbers: train it again"))
            return
        if sequence.token_ns:
            self._next_tokens.append((now - sequence.token_ns) / 1e9)
        sequence.token_ns = now
        if not request.first_token_ns:
            request.first_token_ns = now
            self._first_tokens.append((now - request.arrival_ns) / 1e9)
            for choice in range(1, request.sampling.n):
                self._running.further.append(Sequence(request, choice))
        text = ""
        if request.sampling.max_tokens:
            text = sequence.take(token, self._end_ids)
            request.generated += 1
            sequence.unsaid.append(token)
        else:
            sequence.finish = LENGTH
        if sequence.finish is not None:
            self._running.learn(sequence.generated, request.sampling.max_tokens)
            self._leave(sequence)
            self._end(sequence, text)
        elif text or request.sampling.logprobs is not None:
            self._send(sequence, text)

    def _end(self, sequence: Sequence, text: str) -> None:
        """Says the last part of an answer."""
        request = sequence.request
        request.open.remove(sequence.choice)
        request.ended = not request.open
        self._send(sequence, text)

    def _send(self, sequence: Sequence, text: str) -> None:
        request, tokens, prompt = sequence.request, tuple(sequence.unsaid), ()
        if not sequence.begun:
            text, prompt = request.echo + text, request.told
        sequence.unsaid, sequence.begun = [], True
        counts = len(request.prompt), request.generated
        say(request, AnswerPart(sequence.choice, text, tokens, sequence.finish, request.ended, *counts, prompt))

    def finish(self, request: DecoderRequest, reason: str) -> None:
        """Ends all answers of a request with what there is."""
        if request.ended:
            return
        mine = {sequence.choice: sequence for sequence in self._of(request)}
        for choice in sorted(request.open):
            sequence = mine.get(choice) or Sequence(request, choice)  # it may not have started
            sequence.finish = reason
            if choice in mine:
                self._leave(sequence)
            self._end(sequence, sequence.detokenizer.end() if reason == DEADLINE else "")

    def fail(self, request: DecoderRequest, error: HplmError) -> None:
        with self._lock:
            if request.ended:
                return
            request.ended = True
            for sequence in self._of(request):
                self._leave(sequence)
            say(request, error)

    def _leave(self, sequence: Sequence) -> None:
        self._stager.release(sequence)
        self._running.end(sequence)

    def leave_all(self) -> None:
        for sequence in self._running.all:
            self._leave(sequence)

    def _of(self, request: DecoderRequest) -> list[Sequence]:
        """Returns the sequences of a request that have left the line."""
        return [sequence for sequence in self._running.all if sequence.request is request]

    def observe(self) -> None:
        """Counts the times of this step's tokens."""
        self._meter.observe(FIRST_TOKEN_SECONDS, self._first_tokens)
        self._meter.observe(TOKEN_SECONDS, self._next_tokens)
        self._first_tokens, self._next_tokens = [], []


def say(request: DecoderRequest, piece: AnswerPart | HplmError) -> None:
    """Says a piece. If that fails, nobody can read what follows."""
    try:
        request.respond(piece)
    except Exception:
        log.exception("cannot say a piece: the request is cancelled")
        request.cancelled = True
