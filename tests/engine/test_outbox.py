"""Answers on their way from the engine's process: together where they can be, and each by itself where one is bad."""

import numpy as np
import pytest

from hplm.engine.outbox import Outbox
from hplm.errors import InvalidInput
from hplm.request.answers import bits_of, replies_in
from hplm.tasks import TextAnswer

WANTED = bits_of({"LABEL", "SCORE", "VERSION"})


class Sent(list):
    """A channel that keeps what is sent. `full`: how many times there is no memory for it."""

    full, is_open = 0, True

    def send_bytes(self, parts):
        frame = bytearray().join(parts)
        if self.full:
            self.full -= 1
            raise MemoryError
        self.append(replies_in(frame))

    def shut(self):
        self.is_open = False


@pytest.fixture
def sent():
    return Sent()


@pytest.fixture
def put(sent):
    return Outbox(sent).put


def answer(label):
    return TextAnswer([label], np.ones(1, np.float32), np.zeros((1, 3), np.float32), np.zeros((1, 2), np.int32))


def numbers_in(replies):
    return [[number for number, _ in reply.requests] for reply in replies]


def test_answers_of_one_shape_leave_as_one_reply(sent):
    outbox = Outbox(sent)
    with outbox.together(), outbox.together():
        outbox.put(1, WANTED, 7, [answer("a")])
        with outbox.together():
            outbox.put(2, WANTED, 8, [answer("b"), answer("c")])
        outbox.put(3, WANTED, 0, InvalidInput("no"))
    outbox.put(4, WANTED, 7, [answer("d")])
    (together, alone), (later,) = sent
    assert together.requests == [(1, 1), (2, 2)] and together.failure is None
    assert together.outputs["LABEL"].ravel().tolist() == [b"a", b"b", b"c"]
    assert together.outputs["VERSION"].ravel().tolist() == [b"7", b"8", b"8"]
    assert alone == ([(3, 1)], {}, InvalidInput("no").failure(), None)
    assert later.requests == [(4, 1)]


def test_an_answer_that_cannot_be_sent_fails_only_its_own_request(sent):
    outbox = Outbox(sent)
    with outbox.together():
        for number, label in enumerate(["a", "\ud800", "c"]):
            outbox.put(number, WANTED, 1, [answer(label)])
    first, bad, last = (replies for (replies,) in sent)
    assert numbers_in([first, bad, last]) == [[0], [1], [2]]
    assert first.outputs["LABEL"].tolist() == [[b"a"]] and last.outputs["LABEL"].tolist() == [[b"c"]]
    status, message = bad.failure
    assert status == "INTERNAL" and "UnicodeEncodeError" in message


def test_without_memory_a_short_failure_is_the_answer(sent, put):
    sent.full = 1
    put(1, WANTED, 1, [answer("a")])
    ((reply,),) = sent
    assert reply.requests == [(1, 1)] and "[capacity]" in reply.failure[1]


@pytest.mark.parametrize("error", [MemoryError, BrokenPipeError])
def test_an_engine_that_can_send_nothing_ends(sent, put, monkeypatch, error):
    """The model process answers for it."""

    def fails(parts):
        raise error

    monkeypatch.setattr(sent, "send_bytes", fails)
    put(1, WANTED, 1, [answer("a")])
    assert not sent.is_open
