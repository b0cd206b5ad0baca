"""The engine's process: serves the upper halves of backbones to the model process that started it, and ends with it.

python -m hplm.engine.child DESCRIPTOR
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
from typing import NamedTuple

from hplm.engine.answer import CONFIDENCE, fill, size_of
from hplm.engine.channel import DEVICE_FAILED, Ask, Asks, Beat, Beaten, Begin, Channel, End, Ready, Replies, Reply
from hplm.engine.looked_up import LookedUp
from hplm.engine.memory import LARGE
from hplm.engine.request import Answer
from hplm.engine.service import Service
from hplm.engine.settings import read_all
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
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._ending = threading.Event()

    def run(self) -> None:
        begin = self._channel.receive()
        if not isinstance(begin, Begin):
            return  # the model process has ended already
        try:
            places = list(zip(begin.folders, read_all(begin.parameters).values(), strict=True))
            end = partial(os._exit, DEVICE_FAILED)  # the model process answers for it, and starts another engine
            service = apart(lambda: Service(places, begin.state, self._outbox.together, end))
        except Exception as error:
            if not isinstance(error, HplmError):
                log.exception("the engine cannot be made")
            self._channel.send(Ready(failure=str(error)))
            return
        self._channel.send(Ready())
        beats = threading.Thread(target=self._beat, args=(service,), name="beat", daemon=True)
        beats.start()
        while isinstance(message := self._channel.receive(), Asks):
            with self._outbox.together():  # what is refused
                for ask in message.asks:
                    self._submit(service, ask)
        if not isinstance(message, End):
            os._exit(1)  # the model process has gone, and with it everybody who could be answered
        service.close()
        self._ending.set()
        beats.join()

    def _submit(self, service: Service, ask: Ask) -> None:
        ticket, found = Ticket.read(ask.signed)
        respond = partial(self._outbox.put, ask._replace(signed=b""), ticket)  # a waiting request keeps only its texts
        try:
            service.submit(ticket, LookedUp.unpack(found), respond, ask.id, CONFIDENCE in ask.wanted, ask.backbone)
        except Exception as error:
            respond(error)

    def _beat(self, service: Service) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(BEAT_SECONDS)
            try:
                service.look()
                instruments = [served.instruments for served in service.served]
                beaten = [Beaten(*own.meter.take(), own.busiest) for own in instruments]
                self._channel.send(Beat(beaten, service.computing_s))
            except OSError:  # the model process has gone
                return
            except Exception:
                log.exception("cannot send what was counted")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the model process says when to end
    Child(Channel(int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
