"""Answers on their way from the engine's process: together or each by itself, and in memory that is shared with Triton."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hplm.errors import Internal, InvalidInput, OutOfCapacity
from hplm.process.host import Outbox
from hplm.request.answers import SPARE, SharedMemory, bits_of, replies_in
from hplm.tasks.answers import TextAnswer
from tests.support.message import mentioning
from tests.support.wait import PATIENCE, Hold

WANTED = bits_of({"LABEL", "SCORE", "VERSION"})


class Sent(list):
    """A channel that keeps what is sent. `fails`: how many times it raises an error instead."""

    fails, error, is_open = 0, MemoryError, True

    def send_bytes(self, parts):
        frame = bytearray().join(parts)
        if self.fails:
            self.fails -= 1
            raise self.error
        self.append(replies_in(frame))

    def shut(self):
        self.is_open = False


@pytest.fixture
def sent():
    return Sent()


def answer(label):
    return TextAnswer([label], np.ones(1, np.float32), np.zeros((1, 3), np.float32), np.zeros((1, 2), np.int32))


def test_answers_of_one_shape_leave_as_one_reply(sent):
    outbox = Outbox(sent)
    with outbox, outbox:
        outbox.put(1, WANTED, 7, [answer("a")])
        with outbox:
            outbox.put(2, WANTED, 8, [answer("b"), answer("c")])
        outbox.put(3, WANTED, 0, InvalidInput("no"))
    outbox.put(4, WANTED, 7, [answer("d")])
    (together, alone), (later,) = sent
    assert together.requests == [(1, 1), (2, 2)] and together.failure is None
    assert together.outputs["LABEL"].ravel().tolist() == [b"a", b"b", b"c"]
    assert together.outputs["VERSION"].ravel().tolist() == [b"7", b"8", b"8"]
    assert alone.requests == [(3, 1)] and type(alone.failure) is InvalidInput and str(alone.failure) == "no"
    assert later.requests == [(4, 1)]


def test_an_answer_that_cannot_be_sent_fails_only_its_own_request(sent):
    outbox = Outbox(sent)
    with outbox:
        for number, label in enumerate(["a", "\ud800", "c"]):
            outbox.put(number, WANTED, 1, [answer(label)])
    first, bad, last = (replies for (replies,) in sent)
    assert [reply.requests for reply in (first, bad, last)] == [[(0, 1)], [(1, 1)], [(2, 1)]]
    assert first.outputs["LABEL"].tolist() == [[b"a"]] and last.outputs["LABEL"].tolist() == [[b"c"]]
    assert type(bad.failure) is Internal and "UnicodeEncodeError" in str(bad.failure)


def test_without_memory_a_short_failure_is_the_answer(sent):
    sent.fails = 1
    Outbox(sent).put(1, WANTED, 1, [answer("a")])
    ((reply,),) = sent
    assert reply.requests == [(1, 1)] and type(reply.failure) is OutOfCapacity


@pytest.mark.parametrize("error", [MemoryError, BrokenPipeError])
def test_an_engine_that_can_send_nothing_ends(sent, error):
    """The model process answers for it."""
    sent.fails, sent.error = 100, error
    Outbox(sent).put(1, WANTED, 1, [answer("a")])
    assert not sent.is_open


MB = 1 << 20


class Room(SharedMemory):
    """Shared memory of which so many bytes are free."""

    def __init__(self, left):
        super().__init__(lambda: self.left)
        self.left = left


def test_an_answer_needs_shared_memory_that_is_free_or_that_an_answer_before_it_has_used():
    room = Room(25 * MB + SPARE)
    with room.taken(25 * MB):
        room.left = 0
    with room.taken(25 * MB):
        pass
    with pytest.raises(OutOfCapacity, match=mentioning("27 MB", "/dev/shm", 0, "--shm-size")), room.taken(26 * MB):
        pytest.fail("it was sent")


def test_large_answers_are_sent_one_at_a_time():
    """Memory that one answer is about to take still looks free to another."""
    room, hold, inside, most = Room(25 * MB + SPARE), Hold(), [], []

    def send():
        with room.taken(20 * MB):
            inside.append("one")
            most.append(len(inside))
            hold.pass_through()
            inside.pop()

    with ThreadPoolExecutor(4) as others, hold:
        sent = [others.submit(send) for _ in range(4)]
        for _ in sent:
            hold.until_reached()
            hold.let_one_go()
        for one in sent:
            one.result(PATIENCE)
    assert most == [1] * 4
