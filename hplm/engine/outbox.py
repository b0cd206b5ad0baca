"""Answers on their way from the engine's process: those of one shape together, and each by itself where one is bad."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from typing import NamedTuple

from hplm.engine.channel import Channel
from hplm.engine.request import Answer
from hplm.errors import told
from hplm.request.answers import Reply, names_of, outputs_of, packed
from hplm.tasks import LabelEach

log = logging.getLogger(__name__)


class _Gathered(threading.local):
    """Holds for each thread its answers that have not left, and how many `together` it is within."""

    def __init__(self) -> None:
        self.answers: list[Answered] = []
        self.depth = 0


class Outbox:
    """Sends answers to the model process. Those that a thread puts in within `together` leave as one frame."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gathered = _Gathered()

    def together(self) -> Outbox:
        return self

    def __enter__(self) -> None:
        self._gathered.depth += 1

    def __exit__(self, *raised: object) -> None:
        gathered = self._gathered
        gathered.depth -= 1
        if gathered.answers and not gathered.depth:
            answers, gathered.answers = gathered.answers, []
            self._send(answers)

    def put(self, number: int, wanted: int, version: int, answer: Answer | Reply) -> None:
        answered = Answered(number, wanted, version, answer)
        if self._gathered.depth:
            self._gathered.answers.append(answered)
        else:
            self._send([answered])

    def _send(self, answers: list[Answered]) -> None:
        try:
            alike: dict[Hashable, list[Answered]] = {}
            for answered in map(_in_columns, answers):
                alike.setdefault(answered.shape, []).append(answered)
            self._channel.send_bytes([packed([_reply(some) for some in alike.values()])])
        except Exception as error:
            if isinstance(error, OSError) or (len(answers) == 1 and isinstance(answers[0].answer, Exception)):
                log.exception("cannot send answers")
                self._channel.shut()  # the model process has gone, or answers for this engine, which ends
            elif len(answers) == 1:
                self._send([answers[0]._replace(answer=error)])
            else:
                for answered in answers:  # each by itself, so that only those at fault fail
                    self._send([answered])


class Answered(NamedTuple):
    number: int
    wanted: int  # outputs, as bits
    version: int  # of the tenant
    answer: Answer | Reply  # a reply is a part of an answer of a decoder

    @property
    def shape(self) -> Hashable:
        """Equal for answers that can be outputs of one reply."""
        answer = self.answer
        if isinstance(answer, Reply):
            return id(self)  # the next part of the same answer may be here too
        if isinstance(answer, LabelEach):
            return self.wanted, answer.logits.shape[1]
        return self.number


def _in_columns(answered: Answered) -> Answered:
    """Returns the same with its answer as columns, if it can be."""
    answer = answered.answer
    columns = LabelEach.of(answer) if isinstance(answer, list) else None
    return answered if columns is None else answered._replace(answer=columns)


def _reply(answers: list[Answered]) -> Reply:
    """Returns the reply to requests whose answers have one shape."""
    number, wanted, version, answer = answers[0]
    if isinstance(answer, Reply):
        return answer
    if isinstance(answer, Exception):
        return Reply([(number, 1)], {}, told(answer, "the engine"))
    if isinstance(answer, list):
        return Reply([(number, len(answer))], outputs_of(answer, names_of(wanted), [version] * len(answer)))
    parts = [(one.number, one.version, one.answer) for one in answers if isinstance(one.answer, LabelEach)]
    versions = [version for _, version, part in parts for _ in range(len(part))]
    together = LabelEach.together([part for _, _, part in parts])
    return Reply([(number, len(part)) for number, _, part in parts], outputs_of(together, names_of(wanted), versions))
