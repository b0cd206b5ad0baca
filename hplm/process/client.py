"""Passes requests on to the engine's process, and answers every one of them, whatever becomes of that process.

If the engine ends or stops moving, its requests are answered with an error, and another engine is started. Clients retry those
that only waited. Tenants whose requests were in a batch run alone (`hplm.process.suspects`) and may be quarantined.
This module does not import torch: the process that holds Triton's senders stays small.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hplm.clock import Clock
from hplm.errors import Crashed, Draining, HplmError, for_client
from hplm.location import Location
from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.process.channel import Beat, Begin, request_parts
from hplm.process.in_flight import read
from hplm.process.suspects import Separation
from hplm.process.worker import CLOSE_SECONDS, RESTARTING, STUCK_SECONDS, Worker, Workers
from hplm.request.answers import Reply, replies_in
from hplm.request.form import NO_HEAD, TicketHead
from hplm.threads import Threads

log = logging.getLogger(__name__)

ENDED = Draining("the engine ended while the request waited, and is being started again: send the request again")
CRASHED = Crashed(
    "the engine ended while it computed this request and maybe others: a tenant whose requests do that twice is quarantined, "
    "so look for the cause in the server's log before you send the request again"
)


@dataclass(slots=True, eq=False)
class Pending:
    """A request without an end.

    `respond` sends an answer or an error. It returns the error that was sent instead.
    """

    form: bytes  # checked
    respond: Callable[[Any], HplmError | None]
    _defer: Callable[[], None]  # is called before another thread than that of `submit` may answer
    id: str = ""  # the client's name for it
    wanted: int = 0  # outputs as bits
    head: TicketHead = NO_HEAD
    is_deferred: bool = False
    number: int = -1  # by which the engine knows it
    passed_on: float = 0.0  # when the engine got it; it no longer has its form then
    is_lost: bool = False  # the engine has ended; it is counted as that, and not by its outcome

    def defer(self) -> None:
        self.is_deferred = True
        self._defer()

    def send(self, answer: object) -> HplmError | None:
        """Returns the error that was sent instead."""
        try:
            return self.respond(answer)
        except Exception:
            log.exception("cannot send an answer")
            return None


P = TypeVar("P", bound=Pending)


class EngineClient(ABC, Generic[P]):
    module: str  # what the engine's process runs
    threads = 1  # that answer, because each answer is a round trip to the server process

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, str],
        state: Location | None,
        meter: Meter,
        workers: Callable[..., Workers] = Workers,
        clock: Clock = time,
    ) -> None:
        """Starts the engine, which computes the backbone of this folder. Raises Broken if it cannot serve.

        `workers` makes what keeps the process running.
        """
        self._meter = meter
        self._time = clock
        self._separation = Separation(meter, clock)
        self._given = folder, dict(parameters), state
        self._lock = threading.Lock()
        self._numbers = 0
        self._held: dict[int, P] = {}  # that the engine has
        self._receiving = threading.Lock()  # held by the thread that receives; before the other lock
        self._starts = 0
        for error in (Crashed, Draining):
            meter.add(names.LOST_REQUESTS, 0, error.word)
        self._answering = Threads[Sequence[tuple[P, Any]]](self._answer, "answer", self.threads)
        self.workers = workers(self.module, self._begin, self._receive, self._ended, self._separation.look, clock=clock)

    @abstractmethod
    def _answer_all(self, reply: Reply, alone: bool) -> None:
        """Takes what the engine says of its requests. `alone`: nothing else waits for this thread."""

    @abstractmethod
    def _answer(self, unsent: Sequence[tuple[P, Any]]) -> None:
        """Sends answers, and counts what their clients got."""

    def submit(self, requests: Sequence[P]) -> None:
        """Takes requests. Each gets its end once, through its `respond`."""
        if requests:
            self._pass_on(requests, waits=False)

    def close(self, drain_s: float = CLOSE_SECONDS) -> None:
        """Lets the engine answer what waits, for so long at most, and ends it."""
        self.workers.close(drain_s)
        self._answering.close()

    def _begin(self) -> Begin:
        self._meter.add(names.ENGINE_RESTARTS, min(1, self._starts))
        self._starts += 1
        return Begin(*self._given, self._separation.apart)

    def _pass_on(self, requests: Sequence[P], waits: bool) -> Worker | None:
        """Returns who got the requests. `waits`: the caller receives what is said of them, and defers them after that."""
        now = self._time.monotonic()
        with self._lock:
            worker = self.workers.current
            for number, one in enumerate(requests, self._numbers):
                one.number = number
            self._numbers += len(requests)
            if worker is not None:
                if waits:
                    worker.ring(False)
                else:
                    defer(requests)
                self._held.update({one.number: one for one in requests})
        if worker is None:
            for one in requests:
                self._lose(one, Draining(RESTARTING))
            return None
        try:
            if worker.told is not (apart := self._separation.apart):
                worker.channel.send(apart)
                worker.told = apart
            parts: list[bytes] = []
            for one in requests:
                parts += request_parts(one.number, one.wanted, one.id, one.form)
                one.form, one.passed_on = b"", now
            worker.channel.send_bytes(parts)
        except Exception as error:  # whoever removes a request from `held` answers it
            if isinstance(error, OSError):
                worker.end()  # it has ended, or has got a part of a frame
                error = Draining(RESTARTING)
            else:
                log.exception("cannot pass requests on to the engine")
            for one in requests:
                if (lost := self._taken(one.number)) is not None:
                    self._lose(lost, for_client(error, "passing the request on"))
        return worker

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
                worker.silent_s = 0.0 if message.busy_s < STUCK_SECONDS else float("inf")
                try:
                    self._count(message)
                except Exception:  # its requests do not depend on it
                    log.exception("cannot take what the engine has counted")
            elif isinstance(message, bytearray):
                for reply in replies_in(message):
                    self._answer_all(reply, len(messages) == 1)
        return not messages or messages[-1] is not None

    def _count(self, beat: Beat) -> None:
        self._meter.add_all(beat.counts)
        self._meter.set_all(beat.gauges)

    def _share(self, unsent: list[tuple[P, Any]]) -> None:
        """Lets the threads that answer do so."""
        most = -(-len(unsent) // self._answering.count)
        for start in range(0, len(unsent), most):
            self._answering.put(unsent[start : start + most])

    def _ended(self, worker: Worker, closed: bool) -> None:
        """Answers what the process still had."""
        with self._receiving, self._lock:  # nobody waits: all that it has are deferred
            left, self._held = self._held, {}
        lost_in_batches = set(left)
        try:
            # One that stood still while it staged a batch waited for a disk: its tenants are not to blame.
            computed = [] if closed else list(read(worker.batches, staged=not worker.is_stuck))
            lost_in_batches = {entry.number for entry in computed}
            self._separation.ended(computed)
        except Exception:  # the requests must still be answered, and another engine started
            log.exception("cannot find out which requests may have ended the engine")
        unsent: list[tuple[P, Any]] = []
        for number, pending in left.items():
            lost = CRASHED if number in lost_in_batches else ENDED
            self._meter.add(names.LOST_REQUESTS, 1, lost.word)
            pending.is_lost = True
            unsent.append((pending, lost))
        if left:
            self._share(unsent)
            log.error("the engine had %d requests when it ended", len(left))

    def _taken(self, number: int) -> P | None:
        """Returns a request that has no answer yet, to the first caller."""
        with self._lock:
            return self._held.pop(number, None)

    def _lose(self, one: P, error: HplmError) -> None:
        """Answers a request that no engine got."""
        self._meter.add(names.LOST_REQUESTS, 1, error.word)
        one.send(error)


def defer(requests: Iterable[Pending]) -> None:
    for one in requests:
        one.defer()
