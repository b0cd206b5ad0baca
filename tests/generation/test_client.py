"""The model process of a decoder: parts of answers stay in order, whichever thread sends them."""

import threading
from types import SimpleNamespace

import pytest

from hplm.engine import client as engine_client
from hplm.generation.client import DecoderClient, PendingPrompt
from hplm.metrics.meter import Meter
from hplm.request.answers import End, Reply, strings
from tests.support.wait import Hold, eventually


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Returns a client whose engine is what the test says."""
    engine = SimpleNamespace(close=lambda: None, current=None)
    monkeypatch.setattr(engine_client, "Workers", lambda *given: engine)
    client = DecoderClient(tmp_path / "1", {}, None, Meter())
    yield client
    client.close()


def test_parts_stay_in_order_and_are_sent_at_once_while_nobody_else_sends(client):
    sent, hold = [], Hold()

    def respond(reply):
        sent.append((reply.outputs["text_output"][0], threading.current_thread().name))
        if reply.outputs["text_output"][0] == b"1":
            hold.pass_through()

    pending = PendingPrompt(b"", respond, lambda: None)
    pending.number = 7
    client._held[7] = pending

    def said(number, alone):
        end = End("length", 2, 5, 0) if number == 4 else None
        client._answer_all(Reply([(7, 1)], {"text_output": strings([b"%d" % number])}, end=end), alone)

    here = threading.current_thread().name
    with hold:
        said(0, alone=True)
        assert sent == [(b"0", here)]
        said(1, alone=False)
        hold.until_reached()
        said(2, alone=True)  # another thread still sends
        assert [text for text, _ in sent] == [b"0", b"1"]
    eventually(lambda: client._sent == 2)
    said(3, alone=True)
    said(4, alone=True)
    assert [text for text, _ in sent] == [b"%d" % number for number in range(5)]
    assert [thread == here for _, thread in sent] == [True, False, False, True, True] and not client._held
    said(4, alone=True)
    assert len(sent) == 5, "something was sent behind the end"
