"""Admits, plans, stages, computes, chooses and answers, a step at a time. It has no threads and no clock of its own.

`hplm.engine.process` drives it as it drives an encoder, tests and simulators without threads. While `compute` runs, another
thread may call `offer`, `cancel` and `expire`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hplm.engine.in_flight import InFlight
from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, InvalidInput, OutOfCapacity, QueueFull, for_client
from hplm.generation.choosing import Token, choose
from hplm.generation.forecast import BELIEVED, Ahead, Load
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import CANCELLED, DEADLINE, Piece, Request, Sequence
from hplm.generation.running import Planned, Running, halves
from hplm.generation.staging import Staged
from hplm.metrics.meter import Meter
from hplm.metrics.names import FIRST_TOKEN_SECONDS, LATE_TOKENS, TOKEN_SECONDS
from hplm.model import faults

log = logging.getLogger(__name__)
LEAST_CHUNK = 16  # tokens of prompts in a step, even if a promise for single tokens is broken by it: prompts must get on
SLOWER = 3  # so many times as long may a step take because of prompts, if sequences grow beside them
WAITS = 0.02  # seconds between two looks at the clock while something waits that cannot start yet
MOST_FAILURES = 100  # steps that fail in a row, before the engine ends: nobody has been answered for some seconds


class Staging(Protocol):
    def hold(self, sequence: Sequence) -> None: ...
    def release(self, sequence: Sequence) -> None: ...
    def stage(self, planned: Many[Planned], broken: Callable[[Sequence, HplmError], None]) -> Staged | None: ...


class Computing(Protocol):
    def run(self, step: Staged) -> Tensor: ...

    def wait(self) -> None:
        """Returns when the device has computed all that was started."""


class Prepared(NamedTuple):
    """The next step."""

    planned: list[Planned]
    began_ns: int


class Loop:
    """It is the only owner of its requests, whose lock is around the queue and the answers."""

    def __init__(
        self,
        queue: SequenceQueue,
        running: Running,
        stager: Staging,
        decoder: Computing,
        end_ids: Many[int],
        now_ns: Callable[[], int] = time.monotonic_ns,
        meter: Meter | None = None,
        together: Callable[[], AbstractContextManager[None]] = nullcontext[None],
        device_failed: Callable[[], None] = lambda: None,
        in_flight: InFlight | None = None,
    ) -> None:
        """`meter` counts the times of tokens. `together` surrounds pieces that may leave as one message.

        `device_failed` is called after a fault of the device that stays, and when no step succeeds, before anybody is told.
        """
        self.prompt_tokens = 0  # that were computed, those of sequences that were put back too
        self.alone: frozenset[int] = frozenset()  # tenants whose sequences share no step with those of others
        self.queue = queue
        queue.measure = lambda: self._load
        self.running = running
        self._cost = queue.cost
        self._stager = stager
        self._decoder = decoder
        self._end_ids = end_ids
        self._now_ns = now_ns
        self._meter = meter
        self._together = together
        self._device_failed = device_failed
        self._in_flight = in_flight or InFlight(1, running.seats)
        self._lock = threading.RLock()
        self._computing = self._cancelling = self._abandoned = False
        self._failures = 0  # steps in a row
        self._first_tokens: list[float] = []  # of this step: the seconds since their requests arrived
        self._next_tokens: list[float] = []  # of this step: the seconds since the tokens before them
        self._late_tokens = 0  # of them, those that came later than promised

    def check(self, request: Request) -> None:
        """Raises if the request could never be answered. Any thread may call it."""
        needed, longest = len(request.prompt) + request.sampling.max_tokens, self.running.cache.space.largest
        if needed > longest:
            raise InvalidInput(
                f"a prompt of {len(request.prompt)} tokens with 'max_tokens' {request.sampling.max_tokens} needs memory for "
                f"{needed} tokens, but a sequence has {longest} at most: shorten the prompt, or lower 'max_tokens'"
            )

    def offer(self, sequence: Sequence) -> None:
        """Adds the first sequence of a request, or raises. Answers requests that lose their places to it."""
        with self._together(), self._lock:
            self._cancelling |= sequence.request.cancelled  # since it was read
            for evicted in self.queue.offer([sequence], self._now_ns()):
                tenant = evicted.request.source.tenant
                full = QueueFull(f"too many requests wait, and tenant {tenant!r} has the most: retry after 0.1 s")
                self._fail(evicted.request, full)

    def cancel(self, request: Request) -> None:
        """Ends a request soon, because nobody reads its answers. It still gets its end."""
        with self._lock:
            request.cancelled = self._cancelling = True

    def wait_s(self) -> float:
        """Returns how many seconds nothing has to be done if nothing changes."""
        if self._cancelling:
            return 0.0
        return WAITS if len(self.queue) or len(self.running) else math.inf

    def expire(self) -> None:
        """Ends waiting requests that were cancelled, or are too late."""
        self._expire(self._now_ns())

    def prepare(self) -> Prepared | None:
        """Starts sequences and plans the next step. Returns None if a step is computed, or there is nothing to compute."""
        return self._prepare(self._now_ns())

    def _expire(self, now: int) -> None:
        if not self._cancelling and self.queue.next_expiry() > now:
            return
        with self._together(), self._lock:
            cancelling, self._cancelling = self._cancelling, False
            try:
                for sequence in self.queue.cancelled() if cancelling else ():
                    self._finish(sequence.request, CANCELLED)
                for sequence in self.queue.expired(now):
                    request = sequence.request
                    self._fail(request, DeadlineMissed.after(request.arrival_ns, request.start_by_ns))
            except Exception:
                self._failed()
                raise

    def _prepare(self, now: int) -> Prepared | None:
        with self._lock:
            if self._computing or self._abandoned:
                return None
            self.queue.load = None
            try:
                self._drop(now)
                self._start(now)
                planned, back = self.running.plan(self._most_tokens(), self.alone)
                for sequence in back:
                    self._stager.release(sequence)
            except Exception:
                self._failed()
                raise
            self._computing = bool(planned)
        return Prepared(planned, now) if planned else None

    def compute(self, prepared: Prepared, stage: int = 0, /) -> bool:
        """Computes a step, and says its tokens. Returns False: a decoder has one stage."""
        planned = prepared.planned
        try:
            self._in_flight.enter(self, {one.sequence.request: one.sequence.request.mark for one in planned}.values())
            tokens = self._computed(planned)
            now = self._now_ns()
            with self._together(), self._lock:
                if computed := [one for one in planned if one.sequence.room is not None]:
                    self._count(computed, now - prepared.began_ns)
                for sequence, token in tokens:
                    try:
                        self._took(sequence, token, now)
                    except Exception as error:
                        self._fail(sequence.request, _failure("the answer", error))
                self._observe()
                self.queue.load = None
            self._failures = 0
        except Exception:
            self._failed()
            raise
        finally:
            self._in_flight.leave(self)
            with self._lock:
                self._computing = False
                if self._abandoned:
                    self._leave_all()
        return False

    def _failed(self) -> None:
        """Ends the engine if no step succeeds any more."""
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._device_failed()

    def step(self) -> bool:
        """Does the next step whole. Returns False if there was nothing to compute. For callers without threads."""
        now = self._now_ns()
        self._expire(now)
        prepared = self._prepare(now)
        if prepared is not None:
            self.compute(prepared)
        return prepared is not None

    def close(self) -> None:
        """Refuses new requests. Those that wait are still answered."""
        with self._lock:
            self.queue.close()

    @property
    def is_drained(self) -> bool:
        """Whether all requests have ended, and no further one can come."""
        return self.queue.draining and not len(self.queue) and not len(self.running) and not self._computing

    def abandon(self) -> None:
        """Ends all requests, because the server is shutting down."""
        stopping = Draining("the server is shutting down: send the request again")
        with self._together(), self._lock:
            self._abandoned = True
            self.queue.close()
            for sequence in (*self.queue.abandon(), *self.running.all):
                if not sequence.request.ended:
                    sequence.request.ended = True
                    _say(sequence.request, stopping)
            if not self._computing:
                self._leave_all()

    def _drop(self, now: int) -> None:
        """Ends running requests that were cancelled, or are too late."""
        ending = [
            request
            for sequence in self.running.all
            if (request := sequence.request).cancelled or 0 < request.deadline_ns <= now
        ]
        for request in dict.fromkeys(ending):
            if request.cancelled:
                self._finish(request, CANCELLED)
            elif request.generated:
                self._finish(request, DEADLINE)
            else:
                self._fail(request, DeadlineMissed.after(request.arrival_ns, request.deadline_ns))

    def _start(self, now: int) -> None:
        running = self.running
        started: list[Sequence] = []
        while running.returning and running.start_from(running.returning, oldest := running.returning[0], self._starts):
            started.append(oldest)
        started += self.queue.start(running, now, self._starts)
        for sequence in started:
            if sequence.request.ended:  # it failed to start, or another answer of its request failed in this loop
                continue
            try:
                self._stager.hold(sequence)
            except Exception as error:
                self._broken(sequence, _failure("loading its adapter", error))

    def _starts(self, sequence: Sequence) -> bool:
        """Returns False if there is no memory for the sequence yet. One that fails to start has ended, and waits no longer."""
        try:
            return self.running.start(sequence, self.queue.learned.share)
        except Exception as error:
            self._fail(sequence.request, _failure("starting the answer", error))
            return True

    def _most_tokens(self) -> int:
        """Returns how many tokens a step may have, so that pieces of prompts do not hold up sequences that grow.

        They may take the fair share of their tenants, or SLOWER times what the step takes without them. A promise for the time
        between tokens lowers the second one.
        """
        sequences = self.running.sequences
        growing = [one for one in sequences if one.uncomputed == 1]
        if not growing or len(growing) == len(sequences) or self._cost.observed < BELIEVED:
            return self.running.step_tokens
        load, promised = self._load, [one for one in growing if one.request.promise.token_ns]
        reading = {one.tenant for one in sequences if one.uncomputed > 1} - {one.tenant for one in promised or growing}
        fair_ns = load.fair_ns(len(growing), len({one.tenant for one in sequences}), len(reading))
        without = load.decoding_ns(len(growing))
        bound = max(fair_ns, min([SLOWER * without, *(one.request.promise.token_ns for one in promised)]))
        allowed = len(growing) + int((bound - without) / max(load.token_ns, 1e-9))
        return min(self.running.step_tokens, max(allowed, len(growing) + LEAST_CHUNK))

    def _computed(self, planned: list[Planned]) -> list[tuple[Sequence, Token]]:
        """Computes a step, or its halves if the device has no memory for it. Returns the next tokens. What fails has ended."""
        planned = [one for one in planned if one.sequence.room is not None]  # the others ended with an earlier half
        if not planned:
            return []
        try:
            return self._computed_at_once(planned)
        except Exception as error:
            parts = halves(planned) if faults.is_out_of_memory(error) else ()
            if not parts:
                if faults.stays(error):
                    self._device_failed()
                failure = _failure("computing a step", error)
                for request in {one.sequence.request for one in planned}:
                    self._fail(request, failure)
        return [token for part in parts for token in self._computed(part)]

    @torch.inference_mode()
    def _computed_at_once(self, planned: list[Planned]) -> list[tuple[Sequence, Token]]:
        try:
            step = self._stager.stage(planned, self._broken)
            if step is None:
                return []
            logits = self._decoder.run(step)
            complete = [one.sequence for one in step.planned if one.completes]
            tokens = choose(logits, [one.wish(self._end_ids) for one in complete]) if complete else []
        finally:
            self._decoder.wait()  # a step that failed, or gave no token, may still read slots and rooms that end with a request
        for one in step.planned:
            one.sequence.computed += one.count
        return list(zip(complete, tokens, strict=True))

    def _broken(self, sequence: Sequence, error: HplmError) -> None:
        failure = type(error)(f"tenant {sequence.request.source.tenant!r}: {error}")
        log.error("%s", failure)
        self._fail(sequence.request, failure)

    def _took(self, sequence: Sequence, token: Token, now: int) -> None:
        """Adds a token to an answer, and says what may be said of it."""
        request = sequence.request
        if request.ended:  # with another of its answers
            return
        if token.id < 0:
            self._fail(request, Broken(f"tenant {request.source.tenant!r}: its logits are not numbers: train it again"))
            return
        if sequence.token_ns:
            took = now - sequence.token_ns
            self._next_tokens.append(took / 1e9)
            self._late_tokens += 0 < request.promise.token_ns < took
        sequence.token_ns = now
        if not request.first_token_ns:
            request.first_token_ns = now
            self._first_tokens.append((now - request.arrival_ns) / 1e9)
            self.queue.learned.first_token(sequence.predicted_ns, now - sequence.checked_ns)
            for choice in range(1, request.sampling.n):
                self.running.further.append(Sequence(request, choice))
        text = sequence.take(token, self._end_ids)
        request.generated += 1
        sequence.unsaid.append(token)
        if sequence.finish is not None:
            self._end(sequence, text)
        elif text or request.sampling.logprobs is not None:
            self._send(sequence, text)

    def _end(self, sequence: Sequence, text: str) -> None:
        self.queue.learned.ended(sequence.generated, sequence.request.sampling.max_tokens)
        self._leave(sequence)
        request = sequence.request
        request.open.remove(sequence.choice)
        request.ended = not request.open
        self._send(sequence, text)

    def _send(self, sequence: Sequence, text: str) -> None:
        tokens, sequence.unsaid = tuple(sequence.unsaid), []
        _say(sequence.request, sequence.request.piece(sequence.choice, text, tokens, sequence.finish))

    def _finish(self, request: Request, reason: str) -> None:
        """Ends all answers of a request with what there is."""
        if request.ended:
            return
        mine = {sequence.choice: sequence for sequence in self._of(request)}
        for choice in sorted(request.open):
            sequence = mine.get(choice) or Sequence(request, choice)  # it may not have started
            sequence.finish = reason
            if choice in mine:
                self._leave(sequence)
            request.open.remove(choice)
            request.ended = not request.open
            self._send(sequence, sequence.saying.end() if reason == DEADLINE else "")

    def _fail(self, request: Request, error: HplmError) -> None:
        with self._lock:
            if request.ended:
                return
            request.ended = True
            for sequence in self._of(request):
                self._leave(sequence)
            _say(request, error)

    def _leave(self, sequence: Sequence) -> None:
        self._stager.release(sequence)
        self.running.end(sequence)

    def _leave_all(self) -> None:
        for sequence in self.running.all:
            self._leave(sequence)

    def _of(self, request: Request) -> list[Sequence]:
        """Returns the sequences of a request that have left the line."""
        return [sequence for sequence in self.running.all if sequence.request is request]

    def _count(self, planned: list[Planned], took_ns: int) -> None:
        tokens = sum(one.count for one in planned)
        decoding = sum(one.count == 1 for one in planned)
        if decoding and self._cost.observed >= BELIEVED:
            self.queue.learned.step(self._cost.predict(decoding, decoding), took_ns)
        self._cost.observe(tokens, len(planned), 0, max(took_ns, 1))
        self.prompt_tokens += sum(one.count for one in planned if one.count > 1)

    def _observe(self) -> None:
        """Counts the times of this step's tokens."""
        if self._meter is not None:
            self._meter.observe(FIRST_TOKEN_SECONDS, self._first_tokens)
            self._meter.observe(TOKEN_SECONDS, self._next_tokens)
            self._meter.add(LATE_TOKENS, self._late_tokens)
        self._first_tokens, self._next_tokens, self._late_tokens = [], [], 0

    @property
    def _load(self) -> Load:
        """Returns the load of what runs. By it the queue refuses at once what cannot be in time."""
        running, cost = self.running, self._cost
        step, token, sequence_ns, _ = cost.terms.tolist()
        share = self.queue.learned.share
        ends = sorted((sequence.expected(share), running.places(sequence, share)) for sequence in running.sequences)
        lengths = [sequence.request.sampling.max_tokens for sequence in running.sequences]
        return Load(
            believed=self._cost.observed >= BELIEVED,
            step_ns=step,
            token_ns=token,
            sequence_ns=sequence_ns,
            seats=running.seats,
            step_tokens=running.step_tokens,
            places=running.cache.space.tokens,
            free=running.spare(share),
            uncomputed=running.uncomputed,
            tenants={one.tenant: one.uncomputed > 1 for one in sorted(running.sequences, key=lambda one: one.uncomputed)},
            ends=ends,
            mean_tokens=share * sum(lengths) / len(lengths) if lengths else 1.0,
            further=Ahead(len(running.further), 0, sum(running.places(sequence, share) for sequence in running.further)),
        )


def _say(request: Request, piece: Piece | HplmError) -> None:
    """Says a piece. If that fails, nobody can read what follows."""
    try:
        request.respond(piece)
    except Exception:
        log.exception("cannot say a piece: the request is cancelled")
        request.cancelled = True


def _failure(doing: str, error: Exception) -> HplmError:
    """Logs why something failed. Returns the error that clients get."""
    log.error("%s failed", doing, exc_info=error)
    if faults.is_out_of_memory(error):
        return OutOfCapacity(f"{doing} failed, because the device has no memory: lower cache_tokens or max_sequences")
    return for_client(error, doing)
