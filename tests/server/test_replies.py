"""Senders of responses, without a Triton: its part is played by a stand-in."""

import threading
from types import SimpleNamespace

import pytest

from hplm.server.held import Held
from tests.support.fake_triton import with_fake_triton

FINAL = 1


class Request:
    """A request whose memory Triton frees with its last response. To ask about it then would end the server process."""

    def __init__(self):
        self.is_there, self.asked = True, 0
        self.sending = threading.Event()

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        assert self.is_there
        self.sending.wait(0.001)  # another thread may send in the meantime
        assert self.is_there
        self.asked += 1
        return False

    def send(self, response, flags):
        self.sending.set()
        self.is_there = self.is_there and flags != FINAL


@pytest.fixture
def replies():
    with with_fake_triton(SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL), "backends.replies") as (replies,):
        yield replies


def test_a_request_is_not_asked_about_after_its_last_response(replies):
    for _ in range(200):
        request = Request()
        sender, failures = replies.Sender(request, Held("toy")), []

        def ask(sender=sender, request=request, failures=failures):
            try:
                while request.is_there:
                    assert sender.is_cancelled is False
                assert sender.is_cancelled is False
            except AssertionError as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        sender.send("a part", is_last=False)
        sender.send("the end")
        asking.join(60)
        assert not asking.is_alive()
        assert not failures
        asked = request.asked
        assert sender.is_cancelled is False and request.asked == asked
