"""Answers on their way from the engine's process: together where they can be, and each by itself where one is bad."""

import numpy as np

from hplm.engine.channel import Ask, Replies
from hplm.engine.child import Outbox
from hplm.errors import InvalidInput
from hplm.tasks import TextAnswer
from hplm.tenants.ticket import Ticket

WANTED = frozenset({"LABEL", "SCORE", "VERSION"})


class Sent(list):
    """A channel that keeps what is sent."""

    def send(self, message):
        assert isinstance(message, Replies)
        self.append(message.replies)


def asked(number):
    return Ask(number, b"", "", WANTED)


def ticket(version, deadline_ns=0):
    return Ticket(0, 0, 0, version, 0, deadline_ns, 0, 0)


def answer(label):
    return TextAnswer([label], np.ones(1, np.float32), np.zeros((1, 3), np.float32), np.zeros((1, 2), np.int32))


def test_answers_of_one_shape_leave_as_one_reply():
    sent = Sent()
    outbox = Outbox(sent)
    with outbox.together():
        outbox.put(asked(1), ticket(7), [answer("a")])
        outbox.put(asked(2), ticket(8), [answer("b"), answer("c")])
        outbox.put(asked(3), ticket(7), InvalidInput("no"))
    outbox.put(asked(4), ticket(7), [answer("d")])
    (together, alone), (later,) = sent[0], sent[1]
    assert (together.numbers, together.texts) == ([1, 2], [1, 2])
    assert together.answer["LABEL"].ravel().tolist() == [b"a", b"b", b"c"]
    assert together.answer["VERSION"].ravel().tolist() == [b"7", b"8", b"8"]
    assert (alone.numbers, alone.answer) == ([3], InvalidInput("no").failure())
    assert later.numbers == [4] and len(sent) == 2
    assert not (together.counted or together.deadlines_ns), "none of them can be late"


def test_answers_with_a_deadline_say_where_they_are_counted():
    sent = Sent()
    outbox = Outbox(sent)
    with outbox.together():
        outbox.put(asked(1), ticket(1), [answer("a")], ("one",))
        outbox.put(asked(2), ticket(1, 99), [answer("b")], ("two",))
    ((reply,),) = sent
    assert (reply.counted, reply.deadlines_ns) == ([("one",), ("two",)], [0, 99])


def test_an_answer_that_cannot_be_sent_fails_only_its_own_request():
    sent = Sent()
    outbox = Outbox(sent)
    with outbox.together():
        for number, label in enumerate(["a", "\ud800", "c"]):
            outbox.put(asked(number), ticket(1), [answer(label)])
    ((first, bad, last),) = sent
    assert [reply.numbers for reply in (first, bad, last)] == [[0], [1], [2]]
    assert first.answer["LABEL"].tolist() == [[b"a"]] and last.answer["LABEL"].tolist() == [[b"c"]]
    assert bad.answer[0] == "INTERNAL" and "UnicodeEncodeError" in bad.answer[1]
