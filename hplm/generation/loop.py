"""Admits, plans, stages, computes, chooses and answers, a step at a time. It has no threads and no clock of its own.

`hplm.process.driver` drives it as it drives an encoder, tests and simulators without threads. While `compute` runs, another
thread may call `enqueue`, `cancel` and `expire`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hplm.errors import DeadlineMissed, Draining, InvalidInput, QueueFull
from hplm.generation.answering import SequenceAnswers, Staging, say
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import CANCELLED, DEADLINE, DecoderRequest, Sequence, Token
from hplm.generation.running import Planned, halves
from hplm.generation.sampler import sample
from hplm.generation.staging import Staged
from hplm.metrics.meter import Meter
from hplm.model import faults
from hplm.process.in_flight import InFlight

WAITS = 0.02  # seconds between two looks at the clock while something waits that cannot start yet
MOST_FAILURES = 100  # steps that fail in a row, before the engine ends: nobody has been answered for some seconds
failure = partial(faults.failure, advice="; the device has no memory: lower cache_tokens or max_sequences")


class Computing(Protocol):
    def run(self, step: Staged) -> Tensor: ...

    def wait(self) -> None:
        """Returns when the device has computed all that was started."""


class Loop:
    """It is the only owner of its requests, whose lock is around the queue and the answers."""

    def __init__(
        self,
        queue: SequenceQueue,
        stager: Staging,
        decoder: Computing,
        end_ids: Many[int],
        now_ns: Callable[[], int] = time.monotonic_ns,
        meter: Meter | None = None,
        together: AbstractContextManager[object] | None = None,
        device_failed: Callable[[], None] = lambda: None,
        in_flight: InFlight | None = None,
    ) -> None:
        """`meter` counts the times of tokens. `together` surrounds pieces that may leave as one message.

        `device_failed` is called after a fault of the device that stays, and when no step succeeds, before anybody is told.
        """
        self.alone: frozenset[int] = frozenset()  # tenants whose sequences share no step with those of others
        self.queue = queue
        self.running = running = queue.running
        self._cost = queue.cost
        self._stager = stager
        self._decoder = decoder
        self._end_ids = end_ids
        self._now_ns = now_ns
        self._together = together or nullcontext()
        self._device_failed = device_failed
        self._in_flight = in_flight or InFlight(1, running.max_sequences)
        self._lock = threading.RLock()
        self._computing = self._cancelling = self._abandoned = False
        self._began_ns = 0  # when the step was planned
        self._failures = 0  # steps in a row
        self._answers = SequenceAnswers(running, stager, end_ids, meter or Meter(), self._lock)

    def enqueue(self, request: DecoderRequest) -> None:
        """Adds a request, or raises. Answers requests that lose their places to it."""
        if not request.cancelled:  # otherwise its prompt was not read
            self._check(request)
        with self._together, self._lock:
            self._cancelling |= request.cancelled
            for evicted in self.queue.offer([Sequence(request)], self._now_ns()):
                tenant = evicted.request.tenant.id
                full = QueueFull(f"too many requests wait, and tenant {tenant!r} has the most: retry after 0.1 s")
                self._answers.fail(evicted.request, full)

    def _check(self, request: DecoderRequest) -> None:
        """Raises if the request could never be answered."""
        needed, longest = len(request.prompt) + max(1, request.sampling.max_tokens), self.running.cache.largest
        if needed > longest:
            raise InvalidInput(
                f"a prompt of {len(request.prompt)} tokens with 'max_tokens' {request.sampling.max_tokens} needs memory for "
                f"{needed} tokens, but a sequence has {longest} at most: shorten the prompt, or lower 'max_tokens'"
            )

    def cancel(self, request: DecoderRequest) -> None:
        """Ends a request soon, because nobody reads its answers. It still gets its end."""
        with self._lock:
            request.cancelled = self._cancelling = True

    def wait_s(self) -> float:
        """Returns how many seconds nothing has to be done if nothing changes."""
        if self._cancelling:
            return 0.0
        return WAITS if len(self.queue) or len(self.running) else math.inf

    def expire(self, now: int = 0) -> None:
        """Ends waiting requests that were cancelled, or are too late at this time; 0: at the clock's."""
        now = now or self._now_ns()
        if not self._cancelling and self.queue.next_expiry() > now:
            return
        with self._together, self._lock:
            cancelling, self._cancelling = self._cancelling, False
            try:
                for sequence in self.queue.cancelled() if cancelling else ():
                    self._answers.finish(sequence.request, CANCELLED)
                for sequence in self.queue.expired(now):
                    request = sequence.request
                    self._answers.fail(request, DeadlineMissed.after(request.arrival_ns, request.deadline_ns))
            except Exception:
                self._failed()
                raise

    def prepare(self, now: int = 0) -> list[Planned] | None:
        """Starts sequences and plans the next step. Returns None if a step is computed, or there is nothing to compute."""
        now = now or self._now_ns()
        with self._lock:
            if self._computing or self._abandoned:
                return None
            try:
                self._drop(now)
                self._start(now)
                planned, back = self.running.plan(self.running.most_tokens(self._cost), self.alone)
                for sequence in back:
                    self._stager.release(sequence)
            except Exception:
                self._failed()
                raise
            self._computing, self._began_ns = bool(planned), now
        return planned or None

    def compute(self, planned: list[Planned], stage: int = 0, /) -> bool:
        """Computes a step, and says its tokens. Returns False: a decoder has one stage."""
        try:
            self._in_flight.enter(
                self, {one.sequence.request: one.sequence.request.in_flight_entry for one in planned}.values()
            )
            tokens = self._computed(planned)
            now = self._now_ns()
            with self._together, self._lock:
                if computed := [one.count for one in planned if one.sequence.blocks is not None]:
                    self._cost.observe(sum(computed), len(computed), 0, max(now - self._began_ns, 1))
                for sequence, token in tokens:
                    try:
                        self._answers.took(sequence, token, now)
                    except Exception as error:
                        self._answers.fail(sequence.request, failure("the answer", error))
                self._answers.observe()
            self._failures = 0
        except Exception:
            self._failed()
            raise
        finally:
            self._in_flight.leave(self)
            with self._lock:
                self._computing = False
                if self._abandoned:
                    self._answers.leave_all()
        return False

    def _failed(self) -> None:
        """Ends the engine if no step succeeds any more."""
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            self._device_failed()

    def step(self) -> bool:
        """Does the next step whole. Returns False if there was nothing to compute. For callers without threads."""
        now = self._now_ns()
        self.expire(now)
        prepared = self.prepare(now)
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
        with self._together, self._lock:
            self._abandoned = True
            self.queue.close()
            for sequence in (*self.queue.abandon(), *self.running.all):
                if not sequence.request.ended:
                    sequence.request.ended = True
                    say(sequence.request, stopping)
            if not self._computing:
                self._answers.leave_all()

    def _drop(self, now: int) -> None:
        """Ends running requests that were cancelled, or are too late."""
        ending = [
            request
            for sequence in self.running.all
            if (request := sequence.request).cancelled or 0 < request.deadline_ns <= now
        ]
        for request in dict.fromkeys(ending):
            if request.cancelled:
                self._answers.finish(request, CANCELLED)
            elif request.generated:
                self._answers.finish(request, DEADLINE)
            else:
                self._answers.fail(request, DeadlineMissed.after(request.arrival_ns, request.deadline_ns))

    def _start(self, now: int) -> None:
        running = self.running
        started: list[Sequence] = []
        while running.returning and running.start_from(running.returning, oldest := running.returning[0], self._starts):
            started.append(oldest)
        started += self.queue.start(now, self._starts)
        for sequence in started:
            if sequence.request.ended:  # it failed to start, or another answer of its request failed in this loop
                continue
            try:
                self._stager.hold(sequence)
            except Exception as error:
                self._answers.broken(sequence, failure("loading its adapter", error))

    def _starts(self, sequence: Sequence) -> bool:
        """Returns False if there is no memory for the sequence yet. One that fails to start has ended, and waits no longer."""
        try:
            if sequence.request.cancelled:  # since `expire`: its prompt may be one that was not read
                self._answers.finish(sequence.request, CANCELLED)
                return True
            return self.running.start(sequence)
        except Exception as error:
            self._answers.fail(sequence.request, failure("starting the answer", error))
            return True

    def _computed(self, planned: list[Planned]) -> list[tuple[Sequence, Token]]:
        """Computes a step, or its halves if the device has no memory for it. Returns the next tokens. What fails has ended."""
        planned = [one for one in planned if one.sequence.blocks is not None]  # the others ended with an earlier half
        if not planned:
            return []
        try:
            return self._computed_at_once(planned)
        except Exception as error:
            parts = halves(planned) if faults.is_out_of_memory(error) else ()
            if not parts:
                if faults.stays(error):
                    self._device_failed()
                told = failure("computing a step", error)
                for request in {one.sequence.request for one in planned}:
                    self._answers.fail(request, told)
        return [token for part in parts for token in self._computed(part)]

    @torch.inference_mode()
    def _computed_at_once(self, planned: list[Planned]) -> list[tuple[Sequence, Token]]:
        try:
            step = self._stager.stage(planned, self._answers.broken)
            if step is None:
                return []
            logits = self._decoder.run(step)
            complete = [one.sequence for one in step.planned if one.completes]
            tokens = sample(logits, complete, self._end_ids) if complete else []
        finally:
            self._decoder.wait()  # a step that failed, or gave no token, may still read what ends with a request
        for one in step.planned:
            one.sequence.computed += one.count
        return list(zip(complete, tokens, strict=True))
