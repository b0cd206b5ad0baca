"""The model process of a decoder: parts of answers stay in order, whichever thread sends them."""

import threading
from itertools import count
from types import SimpleNamespace

import pytest

from hplm.generation.client import DecoderClient, PendingPrompt
from hplm.metrics.meter import Meter
from hplm.process.channel import Cancel
from hplm.request.answers import AnswerEnd, Reply, packed, strings
from tests.support.wait import Hold, eventually


class Engine:
    """Stands for the decoder's process, and takes every prompt."""

    def __init__(self, *given, clock):
        self._receive, self.heard = given[2], []
        hear = self.heard.append
        channel = SimpleNamespace(send=hear, send_bytes=hear, arrived=lambda: self.comes.pop(0))
        self.bell = SimpleNamespace(poll=lambda: None)
        self.current = SimpleNamespace(channel=channel, bell=self.bell, told=None)
        self.close = lambda drain_s: None

    def says(self, number, *texts, end=None):
        """Says parts of an answer at once. The thread of the test receives them, until the process ends."""
        replies = [Reply([(number, 1)], {"text_output": strings([text])}, end=end) for text in texts]
        self.comes = [[bytearray(packed([one])) for one in replies], [None]]
        self._receive(self.current)


@pytest.fixture
def client(tmp_path):
    client = DecoderClient(tmp_path / "1", {}, None, Meter(), Engine)
    yield client
    client.close()


def test_parts_stay_in_order_and_are_sent_at_once_while_nobody_else_sends(client):
    engine, sent, hold, here = client.workers, [], Hold(), threading.current_thread()

    def respond(reply):
        sent.append((reply.outputs["text_output"][0], threading.current_thread() is here))
        if sent[-1][0] == b"1":
            hold.pass_through()

    pending = PendingPrompt(b"", respond, lambda: None)
    client.submit([pending])
    with hold:
        engine.says(pending.number, b"0")
        assert sent == [(b"0", True)]
        engine.says(pending.number, b"1", b"2")
        hold.until_reached()
        engine.says(pending.number, b"3")  # another thread still sends
        assert [text for text, _ in sent] == [b"0", b"1"]
    numbers = count(4)
    eventually(lambda: engine.says(pending.number, b"%d" % next(numbers)) or sent[-1][1])
    last = next(numbers)
    engine.says(pending.number, b"%d" % last, end=AnswerEnd("length", 2, 5, 0))
    engine.says(pending.number, b"behind the end")
    assert [text for text, _ in sent] == [b"%d" % number for number in range(last + 1)]
    assert [is_here for _, is_here in sent[:4]] == [True, False, False, False] and sent[-1][1]


def test_a_prompt_that_is_cancelled_before_the_engine_gets_it_is_cancelled_there(client):
    early, other = (PendingPrompt(b"", lambda reply: None, lambda: None) for _ in range(2))
    client.cancel(early)
    client.submit([early, other])
    passed_on, *after = client.workers.heard[-2:]
    assert isinstance(passed_on, list) and after == [Cancel(early.number)]
