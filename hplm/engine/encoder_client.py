"""Passes tickets on to the engine of encoders. Answers that come soon are received by the thread that waits for them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hplm.clock import Clock
from hplm.errors import HplmError
from hplm.location import Location
from hplm.metrics.meter import Outcome, Outcomes, outcome_of
from hplm.process.client import EngineClient, Pending, defer
from hplm.process.worker import Worker, Workers
from hplm.request.answers import Outputs, Reply

log = logging.getLogger(__name__)
SOON_SECONDS = 0.01  # that `submit` waits for answers, unless they have lately taken longer
LEARNING = 0.1  # rate of the running mean of that

OutputsOrError = Outputs | HplmError


class EncoderClient(EngineClient[Pending]):
    module, threads = "hplm.engine.service", 4

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, str],
        state: Location | None,
        meter: Outcomes,
        soon_s: float = SOON_SECONDS,
        workers: Callable[..., Workers] = Workers,
        clock: Clock = time,
    ) -> None:
        """`soon_s`: how long `submit` waits for an answer that may come soon. The others: `EngineClient`."""
        self._outcomes = meter
        self._soon_s = soon_s
        self._took_s = 0.0  # from the engine's getting a request to its answer, a running mean
        super().__init__(folder, parameters, state, meter, workers, clock)

    def submit(self, requests: Sequence[Pending]) -> None:
        """Takes requests. Each is answered once, through its `respond`: before this returns, or else after its `defer`.

        It waits for answers that come soon. Nobody else receives meanwhile, so no thread must be woken for them.
        """
        if not requests:
            return
        waits = self._took_s < self._soon_s and self._receiving.acquire(blocking=False)
        try:
            worker = self._pass_on(requests, waits)
            if waits and worker is not None:
                self._wait(worker, requests)
        finally:
            if waits:
                self._receiving.release()

    def _wait(self, worker: Worker, requests: Sequence[Pending]) -> None:
        """Receives for so long as answers may come soon. Then defers what has none: the keeping thread receives again."""
        now, now_ns = self._time.monotonic(), self._time.monotonic_ns()
        left_ns = min((deadline for one in requests if (deadline := one.head.deadline_ns)), default=sys.maxsize) - now_ns
        until = now + min(self._soon_s, left_ns / 1e9)
        unanswered, numbers = self._held.keys(), [one.number for one in requests]
        try:
            while not unanswered.isdisjoint(numbers):
                messages = worker.channel.arrived(until - self._time.monotonic())
                if not messages or not self._take_in(worker, messages):
                    break
        except Exception:
            log.exception("what the engine said cannot be read")
            worker.end()  # so that the keeping thread answers its requests
        defer(one for one in requests if one.number in unanswered)
        worker.ring(True)

    def _answer_all(self, reply: Reply, alone: bool) -> None:
        requests, outputs, failure = reply[:3]
        held, are_apart, now = self._held, self._separation.apart.alone, self._time.monotonic()
        here: list[tuple[Pending, OutputsOrError]] = []
        later: list[tuple[Pending, OutputsOrError]] = []
        start = 0
        try:
            for number, texts in requests:
                stop = start + texts
                answer = failure or {name: values[start:stop] for name, values in outputs.items()}
                start = stop
                one = held.pop(number, None)  # without the lock: nobody else receives, or finds that the engine has ended
                if one is None:
                    continue
                self._took_s += LEARNING * (now - one.passed_on - self._took_s)
                is_here = not one.is_deferred or (alone and len(requests) == 1)
                (here if is_here else later).append((one, answer))
                if are_apart and not failure:
                    self._separation.answered(one.head.uid)
        finally:
            if later:
                self._share(later)
            self._answer(here)

    def _answer(self, unsent: Sequence[tuple[Pending, OutputsOrError]]) -> None:
        """Sends answers, and counts what their clients got, and when."""
        sent = [(one, answer, one.send(answer), self._time.monotonic_ns()) for one, answer in unsent]
        try:
            self._count_answers(sent)
        except Exception:
            log.exception("cannot count answers")

    def _count_answers(self, sent: Sequence[tuple[Pending, OutputsOrError, HplmError | None, int]]) -> None:
        requests: list[Outcome] = []
        took: list[float] = []
        allowed: list[float] = []
        for one, answer, error, now_ns in sent:
            if one.is_lost:
                continue
            head = one.head
            if error is None and isinstance(answer, HplmError):
                error = answer
            outcome = error.word if error is not None else outcome_of(head.deadline_ns, now_ns)
            requests.append((head.domain, head.tenant, outcome))
            took.append((now_ns - head.arrival_ns) / 1e9)
            if head.deadline_ns:
                allowed.append((head.deadline_ns - head.arrival_ns) / 1e9)
        if requests:
            self._outcomes.count(requests, took, allowed)
