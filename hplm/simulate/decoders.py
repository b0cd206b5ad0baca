"""Generation on a virtual clock: the queue and the loop that serve, with a decoder that takes time and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from hplm.errors import HplmError
from hplm.generation.cache import Cache
from hplm.generation.loop import Loop
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import Piece, Request, Sequence, Source
from hplm.generation.running import Planned, Running
from hplm.generation.sampling import Sampling
from hplm.generation.settings import NO_PROMISE, Promise, Settings
from hplm.generation.staging import Staged
from hplm.metrics.meter import Meter
from hplm.plot.forest import Chain
from hplm.scheduling.policy import policy

WORD, END = 0, 1  # the vocabulary
LONGEST = 2048  # tokens of a sequence
NOTHING = torch.empty(0)
NO_TABLES = Chain.__new__(Chain)  # nothing is looked up
NO_TABLES.links = ()


@dataclass(frozen=True)
class StepCost:
    """Nanoseconds of a step, and more for each of its tokens and sequences."""

    step: float = 20e6
    token: float = 0.5e6
    sequence: float = 0.5e6


@dataclass
class Answer:
    """A request that was taken, and its answer so far."""

    request: Request
    wanted: int  # tokens that it has, if nothing ends it earlier
    last_ns: int = 0  # when its newest token was said
    error: HplmError | None = None

    @property
    def on_time(self) -> bool:
        """Whether the whole answer came, and its first and its last token within their bounds."""
        request = self.request
        return (
            self.error is None
            and request.generated == self.wanted
            and request.first_token_ns <= (request.first_token_by_ns or inf)
            and self.last_ns <= (request.end_by_ns or inf)
        )


class Simulation:
    """Requests come when the caller says so. Nothing is shared between them, not even a prefix within a tenant."""

    def __init__(self, settings: Settings, cost: StepCost) -> None:
        self._answers: dict[Request, Answer] = {}
        self._machine = _Machine(cost, self._answers)
        cache = Cache(settings.cache_tokens, LONGEST, 1, 1, settings.device)
        running = Running(cache, settings.max_sequences, settings.step_tokens)
        self._queue = SequenceQueue(policy(settings.policy), settings.limits, running, settings.admission)
        machine = self._machine
        self.meter = Meter()
        self._loop = Loop(self._queue, machine, machine, (END,), lambda: machine.now_ns, self.meter)
        self._asked = 0

    @property
    def now_ns(self) -> int:
        return self._machine.now_ns

    @property
    def answers(self) -> list[Answer]:
        """The answers to all requests that were taken, in their order."""
        return list(self._answers.values())

    def ask(
        self, prompt: int, wanted: int, most: int, promise: Promise = NO_PROMISE, tenant: int | None = None, n: int = 1
    ) -> Answer:
        """Offers a request of so many tokens, or raises. `most`: its `max_tokens`. `tenant`: None is one of its own."""
        self._asked += 1
        uid = self._asked if tenant is None else tenant
        answer: Answer

        def respond(piece: Piece | HplmError) -> None:
            if isinstance(piece, HplmError):
                answer.error = piece
            else:
                answer.last_ns = self.now_ns

        request = Request(
            Source(f"tenant-{uid}", uid, self._asked, NO_TABLES), [WORD] * prompt, np.zeros(prompt, dtype=np.int64),
            Sampling(temperature=0, max_tokens=most, n=n), respond, _decode, arrival_ns=self.now_ns, seed=0, promise=promise,
        )  # fmt: skip
        answer = self._answers[request] = Answer(request, wanted)
        try:
            self._loop.offer(request)
        except HplmError:
            del self._answers[request]
            raise
        return answer

    def step(self) -> bool:
        """Runs a step of the loop. Returns False if there was nothing to compute."""
        return self._loop.step()

    def until(self, when_ns: int) -> None:
        """Steps until that time, or waits for it."""
        while self.now_ns < when_ns:
            if not self.step():
                self._machine.now_ns = when_ns

    def finish(self) -> None:
        """Steps until all have ended."""
        while self.step() or len(self._loop.running) or len(self._queue):
            pass


class _Machine:
    """Stages and computes nothing. Each answer ends after the tokens that it should have."""

    def __init__(self, cost: StepCost, answers: Mapping[Request, Answer]) -> None:
        self.now_ns = 1
        self._cost = cost
        self._answers = answers

    def hold(self, sequence: Sequence) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass

    def stage(self, planned: Many[Planned], broken: Callable[[Sequence, HplmError], None]) -> Staged:
        return Staged(list(planned), NOTHING, NOTHING, lambda layer, query, key, value: query, [], [], NOTHING)

    def wait(self) -> None:
        pass

    def run(self, step: Staged) -> Tensor:
        cost = self._cost
        tokens, sequences = sum(one.count for one in step.planned), len(step.planned)
        self.now_ns += max(1, int(cost.step + tokens * cost.token + sequences * cost.sequence))
        complete = [one.sequence for one in step.planned if one.completes]
        ends = [sequence.generated + 1 >= self._answers[sequence.request].wanted for sequence in complete]
        return torch.tensor([[0.0, 1.0] if end else [1.0, 0.0] for end in ends])


def _decode(ids: Many[int]) -> str:
    """Each token is a character, so that no text is held back."""
    return "x" * len(ids)
