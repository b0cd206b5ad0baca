"""The engine's process: serves the upper halves of backbones to the model process that started it, and ends with it.

python -m hplm.engine.child CHANNEL BATCHES

Both are descriptors: of a socket, and of memory that shows what is in batches (`hplm.engine.in_flight`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from hplm.engine.answer import CONFIDENCE, fill, size_of
from hplm.engine.channel import DEVICE_FAILED, Apart, Ask, Asks, Beat, Beaten, Begin, Channel, End, Ready, Replies, Reply
from hplm.engine.looked_up import LookedUp
from hplm.engine.memory import LARGE
from hplm.engine.process import Process
from hplm.engine.request import Answer
from hplm.engine.service import Service
from hplm.engine.settings import read_all
from hplm.engine.threads import repeat
from hplm.errors import HplmError, for_client, kind_of
from hplm.metrics.meter import Counted
from hplm.model.openmp import apart
from hplm.tasks import TextAnswer
from hplm.tenants.ticket import Ticket

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


class Outbox:
    """Sends answers to the model process. Those that a thread puts in within `together` leave as one message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gathered = threading.local()

    @contextmanager
    def together(self) -> Generator[None]:
        answers: list[Answered] = []
        self._gathered.answers = answers
        try:
            yield
        finally:
            del self._gathered.answers
            if answers:
                self._send(answers)

    def put(self, ask: Ask, ticket: Ticket, answer: Answer, counted: Counted = ()) -> None:
        answered = Answered(ask, ticket, answer, counted)
        gathered: list[Answered] | None = getattr(self._gathered, "answers", None)
        if gathered is None:
            self._send([answered])
        else:
            gathered.append(answered)

    def _send(self, answers: list[Answered]) -> None:
        alike: dict[Hashable, list[Answered]] = {}
        for answered in answers:
            alike.setdefault(answered.shape, []).append(answered)
        self._channel.send(Replies([reply for some in alike.values() for reply in _replies(some)]))


class Answered(NamedTuple):
    ask: Ask
    ticket: Ticket
    answer: Answer
    counted: Counted  # where it is counted

    @property
    def shape(self) -> Hashable:
        """Equal for answers that can be outputs of one reply."""
        answer = self.answer
        if not isinstance(answer, Exception) and all(text.is_one_label for text in answer):
            return self.ask.wanted, answer[0].logits.shape[1]
        return self.ask.number


def _replies(answers: list[Answered]) -> list[Reply]:
    """Returns one reply with answers of one shape, or one for each if they cannot be put together."""
    if len(answers) == 1:
        return [_reply_or_failure(answers[0])]
    try:
        return [_reply(answers)]
    except Exception:  # of one of them, which must not fail the others
        return [_reply_or_failure(answered) for answered in answers]


def _reply_or_failure(answered: Answered) -> Reply:
    try:
        if isinstance(answered.answer, Exception):
            raise answered.answer
        return _reply([answered])
    except Exception as error:
        if not isinstance(error, HplmError):  # its message may hold what the client sent
            raised = "".join(traceback.format_tb(error.__traceback__))
            log.error("the engine failed: %s, raised in\n%s", kind_of(error), raised)
        failure = for_client(error, "the engine").failure()
    return Reply([answered.ask.number], [1], failure, [], [])


def _reply(answers: list[Answered]) -> Reply:
    texts: list[TextAnswer] = []
    versions: list[int] = []
    counts: list[int] = []
    for answered in answers:
        assert not isinstance(answered.answer, Exception)
        texts += answered.answer
        versions += [answered.ticket.version] * len(answered.answer)
        counts.append(len(answered.answer))
    outputs = fill(texts).outputs(answers[0].ask.wanted, versions)
    counted = [answered.counted for answered in answers]
    deadlines_ns = [answered.ticket.deadline_ns for answered in answers]
    if size_of(outputs) < LARGE and not any(deadlines_ns):  # neither refused for want of shared memory, nor late
        counted, deadlines_ns = [], []
    return Reply([answered.ask.number for answered in answers], counts, outputs, counted, deadlines_ns)


class Child:
    """The main thread sends heartbeats. The process's other threads take in messages and answer them."""

    _service: Service
    _process: Process

    def __init__(self, channel: Channel, shown: int) -> None:
        self._channel = channel
        self._shown = shown
        self._outbox = Outbox(channel)
        self._unopened: SimpleQueue[Ask] = SimpleQueue()  # requests whose generation is not open yet

    def run(self) -> None:
        begin = self._channel.receive()
        if not isinstance(begin, Begin):
            return  # the model process has ended already
        try:
            places = list(zip(begin.folders, read_all(begin.parameters).values(), strict=True))
            end = partial(os._exit, DEVICE_FAILED)  # the model process answers for it, and starts another engine
            self._service = apart(lambda: Service(places, begin.state, self._outbox.together, end, self._shown))
            self._service.separate(begin.apart)
            self._process = Process(self._service, self._channel, self._take_in)
            repeat(self._open_next, "open")
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("the engine cannot be made")
            self._channel.send(Ready(failure=str(error)))
            return
        self._channel.send(Ready())
        while not self._process.ended.wait(BEAT_SECONDS):
            self._beat()
        self._service.close()
        self._beat()

    def _take_in(self, message: object) -> None:
        if isinstance(message, Asks):
            with self._outbox.together():  # what is refused
                for ask in message.asks:
                    self._submit(ask)
        elif isinstance(message, Apart):
            self._service.separate(message)
        elif isinstance(message, End):
            self._process.close()
        else:
            os._exit(1)  # the model process has gone, and with it everybody who could be answered

    def _submit(self, ask: Ask, may_open: bool = False) -> None:
        ticket, found = Ticket.read(ask.signed)
        if not (may_open or self._service.has_open(ticket, ask.backbone)):
            self._unopened.put(ask)  # others do not wait for it
            return
        respond = partial(self._outbox.put, ask._replace(signed=b""), ticket)  # a waiting request keeps only its texts
        try:
            looked_up, with_confidence = LookedUp.unpack(found), CONFIDENCE in ask.wanted
            self._service.submit(ticket, looked_up, respond, ask.id, with_confidence, ask.backbone, ask.number)
        except Exception as error:
            respond(error)

    def _open_next(self) -> bool:
        self._submit(self._unopened.get(), may_open=True)
        self._process.wake()
        return True

    def _beat(self) -> None:
        try:
            beaten = [self._counted(number) for number in range(len(self._service.served))]
            self._channel.send(Beat(beaten, self._process.busy_s))
        except OSError:
            log.info("the model process has gone")

    def _counted(self, backbone: int) -> Beaten:
        """Returns the counts of a backbone. A failure of counting leaves them out, but not the heartbeat."""
        instruments = self._service.served[backbone].instruments
        try:
            self._service.look(backbone)
            return Beaten(*instruments.meter.take(), instruments.busiest)
        except Exception:
            log.exception("cannot send what was counted")
            return Beaten({}, {}, instruments.busiest)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the model process says when to end
    Child(Channel(int(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
