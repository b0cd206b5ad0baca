"""Senders of responses, without a Triton: its part is played by a stand-in."""

import importlib
import sys
import threading
from types import SimpleNamespace

import pytest

from hplm.server.held import Held

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
def replies(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL))
    monkeypatch.delitem(sys.modules, "backends.replies", raising=False)
    yield importlib.import_module("backends.replies")
    sys.modules.pop("backends.replies", None)


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
        asking.join()
        assert not failures
        asked = request.asked
        assert sender.is_cancelled is False and request.asked == asked
