"""Admit, plan, stage, compute, choose and say: one step after the other. It has no threads and no clock of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

import torch
from torch import Tensor

from hplm.errors import Broken, DeadlineMissed, Draining, HplmError, InvalidInput, OutOfCapacity, QueueFull, for_client
from hplm.generation.choosing import Token, choose
from hplm.generation.forecast import BELIEVED, Ahead, Load
from hplm.generation.line import Line
from hplm.generation.request import CANCELLED, DEADLINE, Piece, Request, Sequence
from hplm.generation.running import Planned, Running, halves
from hplm.generation.staging import Staged
from hplm.metrics.meter import Meter
from hplm.metrics.names import FIRST_TOKEN_SECONDS, LATE_TOKENS, TOKEN_SECONDS
from hplm.model import faults
from hplm.scheduling.cost import CostModel

log = logging.getLogger(__name__)
LEAST_CHUNK = 16  # tokens of prompts in a step, even if a promise for single tokens is broken by it: prompts must get on
SLOWER = 3  # so many times as long may a step take because of prompts, if sequences grow beside them


class Staging(Protocol):
    def hold(self, sequence: Sequence) -> None: ...
    def release(self, sequence: Sequence) -> None: ...
    def stage(self, planned: Many[Planned], broken: Callable[[Sequence, HplmError], None]) -> Staged | None: ...


class Computing(Protocol):
    def run(self, step: Staged) -> Tensor: ...

    def wait(self) -> None:
        """Returns when the device has computed all that was started."""


class Loop:
    """One thread calls `step`. Requests come through `line`; the loop is their only owner from then on."""

    def __init__(
        self,
        line: Line,
        running: Running,
        stager: Staging,
        decoder: Computing,
        end_ids: Many[int],
        now_ns: Callable[[], int],
        say: Callable[[Request, Piece | HplmError], None],
        meter: Meter | None = None,
    ) -> None:
        """`say` is called once for each piece of a request, in order. `meter` counts the times of tokens."""
        self.prompt_tokens = 0  # that were computed, those of sequences that were put back too
        self.device_failed = False  # with a fault that stays
        self.cost = CostModel()
        self.running = running
        self._line = line
        self._stager = stager
        self._decoder = decoder
        self._end_ids = end_ids
        self._now_ns = now_ns
        self._say = say
        self._meter = meter
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

    def step(self) -> bool:
        """Runs one step. Returns False if there was nothing to compute."""
        begin = self._now_ns()
        self._drop(begin)
        self._start(begin)
        planned, back = self.running.plan(self._most_tokens())
        for sequence in back:
            self._stager.release(sequence)
        if not planned:
            self._line.publish(self._load)
            return False
        tokens = self._computed(planned)
        now = self._now_ns()
        if computed := [one for one in planned if one.sequence.room is not None]:
            self._count(computed, now - begin)
        for sequence, token in tokens:
            try:
                self._took(sequence, token, now)
            except Exception as error:
                self._fail(sequence.request, _failure("the answer", error))
        self._observe()
        self._line.publish(self._load)
        return True

    def abandon(self) -> None:
        """Ends all requests, because the server is shutting down."""
        stopping = Draining("the server is shutting down: send the request again")
        for sequence in (*self._line.displaced(), *self._line.abandon(), *self.running.all):
            self._fail(sequence.request, stopping)

    def _drop(self, now: int) -> None:
        """Ends what was cancelled and what is too late."""
        for sequence in self._line.displaced():
            self._fail(
                sequence.request,
                QueueFull(
                    f"too many requests wait, and tenant {sequence.request.source.tenant!r} has the most: retry after 0.1 s"
                ),
            )
        for sequence in self._line.cancelled():
            self._finish(sequence.request, CANCELLED)
        for sequence in self._line.expired(now):
            request = sequence.request
            self._fail(request, DeadlineMissed.after(request.arrival_ns, request.start_by_ns))
        for request in dict.fromkeys(sequence.request for sequence in self.running.all):
            if request.cancelled:
                self._finish(request, CANCELLED)
            elif request.deadline_ns and request.deadline_ns <= now:
                if request.generated:
                    self._finish(request, DEADLINE)
                else:
                    self._fail(request, DeadlineMissed.after(request.arrival_ns, request.deadline_ns))

    def _start(self, now: int) -> None:
        running = self.running
        started: list[Sequence] = []
        while running.returning and running.start_from(running.returning, oldest := running.returning[0], self._starts):
            started.append(oldest)
        started += self._line.start(running, now, self.cost, self._starts)
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
            return self.running.start(sequence, self._line.learned.share)
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
        if not growing or len(growing) == len(sequences) or self.cost.observed < BELIEVED:
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
                self.device_failed |= faults.stays(error)
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
            self._line.learned.first_token(sequence.predicted_ns, now - sequence.checked_ns)
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
        self._line.learned.ended(sequence.generated, sequence.request.sampling.max_tokens)
        self._leave(sequence)
        request = sequence.request
        request.open.remove(sequence.choice)
        request.ended = not request.open
        self._send(sequence, text)

    def _send(self, sequence: Sequence, text: str) -> None:
        tokens, sequence.unsaid = tuple(sequence.unsaid), []
        self._say(sequence.request, sequence.request.piece(sequence.choice, text, tokens, sequence.finish))

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
        if request.ended:
            return
        request.ended = True
        for sequence in self._of(request):
            self._leave(sequence)
        self._say(request, error)

    def _leave(self, sequence: Sequence) -> None:
        self._stager.release(sequence)
        self.running.end(sequence)

    def _of(self, request: Request) -> list[Sequence]:
        """Returns the sequences of a request that have left the line."""
        return [sequence for sequence in self.running.all if sequence.request is request]

    def _count(self, planned: list[Planned], took_ns: int) -> None:
        tokens = sum(one.count for one in planned)
        decoding = sum(one.count == 1 for one in planned)
        if decoding and self.cost.observed >= BELIEVED:
            self._line.learned.step(self.cost.predict(decoding, decoding), took_ns)
        self.cost.observe(tokens, len(planned), 0, max(took_ns, 1))
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
        """Returns the load of what runs. By it the line refuses at once what cannot be in time."""
        running, cost = self.running, self.cost
        step, token, sequence_ns, _ = cost.terms.tolist()
        share = self._line.learned.share
        ends = sorted((sequence.expected(share), running.places(sequence, share)) for sequence in running.sequences)
        lengths = [sequence.request.sampling.max_tokens for sequence in running.sequences]
        return Load(
            believed=self.cost.observed >= BELIEVED,
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


def _failure(doing: str, error: Exception) -> HplmError:
    """Logs why something failed. Returns the error that clients get."""
    log.error("%s failed", doing, exc_info=error)
    if faults.is_out_of_memory(error):
        return OutOfCapacity(f"{doing} failed, because the device has no memory: lower cache_tokens or max_sequences")
    return for_client(error, doing)
