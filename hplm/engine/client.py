"""Passes requests on to the engine's process, and answers every one of them, whatever becomes of that process.

If the engine ends or stops moving, its requests are answered with an error, and another engine is started. Clients retry those
that only waited. Tenants whose requests were in a batch run alone (`hplm.engine.suspects`) and may end in quarantine.
This module does not import torch: the process that holds Triton's senders stays small.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hplm.engine.channel import Beat, Begin, request_parts
from hplm.engine.in_flight import number_of, read
from hplm.engine.suspects import Separation
from hplm.engine.threads import repeat
from hplm.engine.worker import RESTARTING, Worker, Workers
from hplm.errors import Crashed, Draining, HplmError, Internal, error_in, for_client
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.outcomes import Outcome, Outcomes
from hplm.registry.store import Place
from hplm.request.answers import Outputs, Reply, replies_in
from hplm.request.form import read_head

log = logging.getLogger(__name__)
STUCK_SECONDS = 60.0  # an engine that prepares or computes a batch for so long is ended
ANSWERING_THREADS = 4  # each answer is a round trip to the server process
SOON_SECONDS = 0.01  # that `submit` waits for answers, unless they have lately taken longer
LEARNING = 0.1  # rate of the running mean of that

ENDED = Draining("the engine ended while the request waited, and is being started again: send the request again")
CRASHED = Crashed(
    "the engine ended while it computed this request and maybe others: a tenant whose requests do that twice is quarantined, "
    "so look for the cause in the server's log before you send the request again"
)

Failure = tuple[str, str]  # the status, and the message for the wire
Answer = Outputs | Failure
Respond = Callable[[Answer], HplmError | None]  # sends an answer; returns the error that was sent instead


class Pending:
    """A request without an answer."""

    __slots__ = ("_defer", "backbone", "form", "head", "id", "is_deferred", "is_lost", "passed_on", "respond", "wanted")

    def __init__(
        self, form: bytes, id: str, wanted: int, respond: Respond, defer: Callable[[], None], backbone: int = 0
    ) -> None:
        """`form` is checked. `id`: the client's name for it. `wanted`: outputs as bits. `backbone`: whose lookup has signed it.

        `defer` is called before another thread than that of `submit` may answer.
        """
        self.form, self.id, self.wanted, self.backbone = form, id, wanted, backbone
        self.respond, self._defer = respond, defer
        self.is_deferred = False
        self.head = read_head(form)
        self.passed_on = 0.0  # when the engine got it; it no longer has its form then
        self.is_lost = False  # the engine has ended; it is counted as that, and not by its outcome

    def defer(self) -> None:
        self.is_deferred = True
        self._defer()

    def send(self, answer: Answer) -> HplmError | None:
        """Returns the error that was sent instead."""
        try:
            return self.respond(answer)
        except Exception:
            log.exception("cannot send an answer")
            return None


Unsent = list[tuple[Pending, Answer]]


class EngineClient:
    def __init__(
        self, folders: Sequence[Path], parameters: Mapping[str, str], state: Place | None, meters: Sequence[Meter]
    ) -> None:
        """Starts the engine, which computes the backbones of these folders. Raises Broken if it cannot serve."""
        self.outcomes = [Outcomes(meter) for meter in meters]  # by backbone
        self._meters = meters
        self._separation = Separation(folders, meters)
        self._given = folders, dict(parameters), state
        self._lock = threading.Lock()
        self._numbers = 0
        self._held: dict[int, Pending] = {}  # that the engine has
        self._receiving = threading.Lock()  # held by the thread that receives; before the other lock
        self._took_s = 0.0  # from the engine's getting a request to its answer, a running mean
        self._starts = 0
        for meter in meters:
            for error in (Crashed, Draining):
                meter.add(names.LOST_REQUESTS, 0, error.word)
        self._answers: queue.SimpleQueue[Unsent | None] = queue.SimpleQueue()
        self._answering = [repeat(self._answer_next, "answer") for _ in range(ANSWERING_THREADS)]
        self.workers = Workers(self._begin, self._receive, self._ended, self._separation.look)

    def _begin(self) -> Begin:
        for meter in self._meters:
            meter.add(names.ENGINE_RESTARTS, min(1, self._starts))
        self._starts += 1
        return Begin(*self._given, self._separation.apart)

    def submit(self, requests: Sequence[Pending]) -> None:
        """Takes requests. Each is answered once, through its `respond`: before this returns, or else after its `defer`.

        It waits for answers that come soon. Nobody else receives meanwhile, so no thread must be woken for them.
        """
        if not requests:
            return
        waits = self._took_s < SOON_SECONDS and self._receiving.acquire(blocking=False)
        try:
            self._pass_on(requests, waits)
        finally:
            if waits:
                self._receiving.release()

    def _pass_on(self, requests: Sequence[Pending], waits: bool) -> None:
        now = time.monotonic()
        with self._lock:
            worker = self.workers.current
            numbers = range(self._numbers, self._numbers + len(requests))
            self._numbers += len(requests)
            if worker is not None:
                if waits:
                    worker.ring(False)
                else:
                    _defer(requests)
                self._held.update(zip(numbers, requests, strict=True))
        if worker is None:
            for one in requests:
                self._lose(one, Draining(RESTARTING))
            return
        try:
            if worker.told is not (apart := self._separation.apart):
                worker.channel.send(apart)
                worker.told = apart
            parts: list[bytes] = []
            for number, one in zip(numbers, requests, strict=True):
                parts += request_parts(number, one.backbone, one.wanted, one.id, one.form)
                one.form, one.passed_on = b"", now
            worker.channel.send_bytes(parts)
        except Exception as error:  # whoever removes a request from `held` answers it
            if isinstance(error, OSError):
                worker.end()  # it has ended, or has got a part of a frame
                error = Draining(RESTARTING)
            else:
                log.exception("cannot pass requests on to the engine")
            for number in numbers:
                if (lost := self._taken(number)) is not None:
                    self._lose(lost, for_client(error, "passing the request on"))
        if waits:
            self._wait(worker, requests, numbers)

    def _wait(self, worker: Worker, requests: Sequence[Pending], numbers: range) -> None:
        """Receives for so long as answers may come soon. Then defers what has none: the keeping thread receives again."""
        now, now_ns = time.monotonic(), time.monotonic_ns()
        left_ns = min((deadline for one in requests if (deadline := one.head.deadline_ns)), default=sys.maxsize) - now_ns
        until = now + min(SOON_SECONDS, left_ns / 1e9)
        unanswered = self._held.keys()
        try:
            while not unanswered.isdisjoint(numbers):
                messages = worker.channel.arrived(until - time.monotonic())
                if not messages or not self._take_in(worker, messages):
                    break
        except Exception:
            log.exception("what the engine said cannot be read")
            worker.end()  # so that the keeping thread answers its requests
        _defer(one for number, one in zip(numbers, requests, strict=True) if number in unanswered)
        worker.ring(True)

    def close(self) -> None:
        """Lets the engine answer what waits, and ends it."""
        self.workers.close()
        for _ in self._answering:
            self._answers.put(None)
        for thread in self._answering:
            thread.join()

    def _receive(self, worker: Worker) -> None:
        """Receives what `submit` does not receive itself, until the engine has gone."""
        is_open = True
        while is_open:
            worker.bell.poll()
            with self._receiving:
                is_open = self._take_in(worker, worker.channel.arrived())

    def _take_in(self, worker: Worker, messages: Sequence[object]) -> bool:
        """Takes messages. Returns False when the engine has gone."""
        for message in messages:
            if isinstance(message, Beat):
                self._count(worker, message)
            elif isinstance(message, bytearray):
                for reply in replies_in(message):
                    self._answer_all(reply, len(messages) == 1)
        return not messages or messages[-1] is not None

    def _count(self, worker: Worker, beat: Beat) -> None:
        worker.silent_s = 0.0 if beat.computing_s < STUCK_SECONDS else float("inf")
        for outcomes, beaten in zip(self.outcomes, beat.backbones, strict=True):
            outcomes.meter.add_all(beaten.counts)
            outcomes.meter.set_all(beaten.levels)
            outcomes.look()

    def _answer_all(self, reply: Reply, alone: bool) -> None:
        """Answers requests. `alone`: nothing else waits for this thread."""
        requests, outputs, failure = reply
        held, are_apart, now = self._held, self._separation.apart.alone, time.monotonic()
        here: Unsent = []
        later: Unsent = []
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
                if are_apart and not failure:
                    self._separation.answered(number_of(one.backbone, one.head.uid))
                is_here = not one.is_deferred or (alone and len(requests) == 1)
                (here if is_here else later).append((one, answer))
        finally:
            if later:
                self._share(later)
            self._answer(here)

    def _share(self, unsent: Unsent) -> None:
        """Lets several threads answer: each answer is a round trip to the server process."""
        most = -(-len(unsent) // ANSWERING_THREADS)
        for start in range(0, len(unsent), most):
            self._answers.put(unsent[start : start + most])

    def _ended(self, worker: Worker, closed: bool) -> None:
        """Answers what the process still had."""
        with self._receiving, self._lock:  # nobody waits: all that it has are deferred
            left, self._held = self._held, {}
        lost_in_batches = set(left)
        try:
            computed = [] if closed else list(read(worker.batches))
            lost_in_batches = {mark.number for mark in computed}
            self._separation.ended(computed)
        except Exception:  # the requests must still be answered, and another engine started
            log.exception("cannot find out which requests may have ended the engine")
        unsent: Unsent = []
        for number, pending in left.items():
            lost = CRASHED if number in lost_in_batches else ENDED
            self._meters[pending.backbone].add(names.LOST_REQUESTS, 1, lost.word)
            pending.is_lost = True
            unsent.append((pending, lost.failure()))
        if left:
            self._share(unsent)
            log.error("the engine had %d requests when it ended", len(left))

    def _taken(self, number: int) -> Pending | None:
        """Returns a request that has no answer yet, to the first caller."""
        with self._lock:
            return self._held.pop(number, None)

    def _lose(self, one: Pending, error: HplmError) -> None:
        """Answers a request that no engine got."""
        self._meters[one.backbone].add(names.LOST_REQUESTS, 1, error.word)
        one.send(error.failure())

    def _answer(self, unsent: Unsent) -> None:
        """Sends answers, and counts what their clients got, and when."""
        sent = [(one, answer, one.send(answer), time.monotonic_ns()) for one, answer in unsent]
        counted: list[tuple[list[Outcome], list[float]]] = [([], []) for _ in self.outcomes]
        for one, answer, error, now_ns in sent:
            if one.is_lost:
                continue
            head, (requests, allowed) = one.head, counted[one.backbone]
            if error is None and isinstance(answer, tuple):
                error = error_in(answer[1]) or Internal
            outcome = error.word if error is not None else names.outcome(head.deadline_ns, now_ns)
            requests.append((head.domain, head.tenant, outcome))
            if head.deadline_ns:
                allowed.append((head.deadline_ns - head.arrival_ns) / 1e9)
        for outcomes, (requests, allowed) in zip(self.outcomes, counted, strict=True):
            if requests:
                outcomes.count(requests, allowed)

    def _answer_next(self) -> bool:
        unsent = self._answers.get()
        if unsent is not None:
            self._answer(unsent)
        return unsent is not None


def _defer(requests: Iterable[Pending]) -> None:
    for one in requests:
        one.defer()
