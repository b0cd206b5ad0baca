"""The process of an engine, of encoders or of a decoder: what the model process tells it, and what it tells that one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from hplm.errors import HplmError, logged_error
from hplm.metrics.meter import Meter
from hplm.process.channel import (
    DEVICE_FAILED,
    Apart,
    Beat,
    Begin,
    Cancel,
    Channel,
    Passed,
    Ready,
    Shutdown,
    requests_in,
)
from hplm.process.driver import Driver
from hplm.request.answers import AnswersOrError, Reply, names_of, outputs_of, packed
from hplm.server.log import begin_log
from hplm.tasks.answers import LabelEach
from hplm.threads import Beats

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


class Serving(Protocol):
    """The service in an engine's process: of an encoder (`hplm.engine.service`), or of a decoder."""

    meter: Meter

    def driven(self, channel: Channel, take_in: Callable[[object], None], /) -> Driver: ...  # starts its threads
    def take(self, requests: Iterable[Passed], /) -> None: ...  # it does not raise
    def cancel(self, number: int, /) -> None: ...  # nobody reads the answer to this request
    def separate(self, apart: Apart, /) -> None: ...
    def busy_since(self) -> list[float]: ...  # when the pieces of work began that its own threads are at now
    def close(self) -> None: ...  # its requests are answered before


class Host:
    """The main thread sends heartbeats. The process's other threads take in messages and answer them."""

    _service: Serving
    _driver: Driver

    def __init__(
        self,
        channel: Channel,
        shown: int,
        open: Callable[[Begin, Host], Serving],
        beat_s: float = BEAT_SECONDS,
        exit: Callable[[int], None] = os._exit,
    ) -> None:
        """`shown`: the descriptor of memory that shows what is in batches (`hplm.process.in_flight`).

        `open` makes what is served, or raises. `beat_s`: between heartbeats. `exit` ends the process with a code.
        """
        self._channel = channel
        self._open, self._beat_s, self._exit = open, beat_s, exit
        self._beats = Beats()
        self.shown = shown
        self.outbox = Outbox(channel)
        # Ends the process: the model process answers for it, and starts another one.
        self.device_failed: Callable[[], None] = partial(exit, DEVICE_FAILED)

    def run(self) -> None:
        begin = self._channel.receive()
        if not isinstance(begin, Begin):
            return  # the model process has ended already
        try:
            self._service = self._open(begin, self)
            self._service.separate(begin.apart)
            self._driver = self._service.driven(self._channel, self._take_in)
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("the engine cannot be made")
            self._channel.send(Ready(failure=str(error)))
            return
        self._channel.send(Ready())
        while not self._driver.ended.wait(self._beat_s):
            self._beat()
        self._service.close()
        self._beat()

    def _take_in(self, message: object) -> None:
        if isinstance(message, bytearray):
            with self.outbox:  # what is refused
                self._service.take(requests_in(message))
        elif isinstance(message, Apart):
            self._service.separate(message)
        elif isinstance(message, Cancel):
            self._service.cancel(message.number)
        elif isinstance(message, Shutdown):
            self._driver.close()
        else:
            self._exit(1)  # the model process has gone, and with it everybody who could be answered

    def _beat(self) -> None:
        busy_s = self._beat_s * self._beats.count([*self._driver.busy_since(), *self._service.busy_since()])
        try:
            counts, gauges = self._service.meter.take()
        except Exception:  # a failure of counting leaves the counts out, but not the heartbeat
            log.exception("cannot send what was counted")
            counts, gauges = {}, {}
        try:
            self._channel.send(Beat(counts, gauges, busy_s))
        except OSError:
            log.info("the model process has gone")
        except Exception:
            log.exception("cannot send what was counted")
            self._channel.send(Beat({}, {}, busy_s))


# The number of a request, its wanted outputs as bits, its tenant's version, and its answer, or a part of that of a decoder.
Answered = tuple[int, int, int, AnswersOrError | Reply]


class _Gathered(threading.local):
    """Holds for each thread its answers that have not left, and how many `with outbox` it is within."""

    def __init__(self) -> None:
        self.answers: list[Answered] = []
        self.depth = 0


class Outbox:
    """Sends answers to the model process. Those that a thread puts in within `with outbox` leave as one frame."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gathered = _Gathered()

    def __enter__(self) -> None:
        self._gathered.depth += 1

    def __exit__(self, *raised: object) -> None:
        gathered = self._gathered
        gathered.depth -= 1
        if gathered.answers and not gathered.depth:
            answers, gathered.answers = gathered.answers, []
            self._send(answers)

    def put(self, number: int, wanted: int, version: int, answer: AnswersOrError | Reply) -> None:
        if self._gathered.depth:
            self._gathered.answers.append((number, wanted, version, answer))
        else:
            self._send([(number, wanted, version, answer)])

    def _send(self, answers: list[Answered]) -> None:
        try:
            alike: dict[tuple[int, int], list[tuple[int, int, LabelEach]]] = {}  # answers that can be outputs of one reply
            others: list[Reply] = []
            for number, wanted, version, answer in answers:
                columns = LabelEach.of(answer) if isinstance(answer, list) else answer
                if isinstance(columns, LabelEach):
                    alike.setdefault((wanted, columns.logits.shape[1]), []).append((number, version, columns))
                else:
                    others.append(_reply(number, wanted, version, answer))
            self._channel.send_bytes([packed([_together(wanted, parts) for (wanted, _), parts in alike.items()] + others)])
        except Exception as error:
            if isinstance(error, OSError) or (len(answers) == 1 and isinstance(answers[0][-1], Exception)):
                log.exception("cannot send answers")
                self._channel.shut()  # the model process has gone, or answers for this engine, which ends
            elif len(answers) == 1:
                self._send([(*answers[0][:-1], error)])
            else:
                for answered in answers:  # each by itself, so that only those at fault fail
                    self._send([answered])


def _reply(number: int, wanted: int, version: int, answer: AnswersOrError | Reply) -> Reply:
    if isinstance(answer, Reply):
        return answer
    if isinstance(answer, Exception):
        return Reply([(number, 1)], {}, logged_error(answer, "the engine"))
    return Reply([(number, len(answer))], outputs_of(answer, names_of(wanted), [version] * len(answer)))


def _together(wanted: int, parts: list[tuple[int, int, LabelEach]]) -> Reply:
    """Returns the reply to requests, given with their tenants' versions, whose answers have one shape."""
    requests = [(number, len(part)) for number, _, part in parts]
    versions = [version for (_, version, _), (_, texts) in zip(parts, requests, strict=True) for _ in range(texts)]
    return Reply(requests, outputs_of(LabelEach.together([part for _, _, part in parts]), names_of(wanted), versions))


def run(open: Callable[[Begin, Host], Serving]) -> None:
    """Runs the process. Its arguments are the descriptors of a socket, and of memory that shows what is in batches."""
    begin_log()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the model process says when to end
    Host(Channel(int(sys.argv[1])), int(sys.argv[2]), open).run()
