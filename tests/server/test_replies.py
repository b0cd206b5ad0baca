"""Responses and probes that fail, without a Triton: its part is played here."""

import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.engine.memory import LARGE
from hplm.errors import Draining, Internal
from hplm.server.held import Held
from tests.support import fake_triton
from tests.support.fake_triton import FINAL, fake_utilities, with_fake_triton
from tests.support.wait import PATIENCE


class Request(fake_triton.Request):
    """A request whose memory Triton frees with its last response. To ask about it then would end the server process."""

    def __init__(self):
        super().__init__({}, {})
        self.is_there, self.asked, self.sending = True, 0, threading.Event()
        self.is_cancelled = self._is_cancelled

    def _is_cancelled(self):
        assert self.is_there
        self.sending.wait(0.001)  # another thread may send in the meantime
        assert self.is_there
        self.asked += 1
        return False

    def send(self, response, flags):
        self.sending.set()
        self.is_there = self.is_there and flags != FINAL


def test_a_request_is_not_asked_about_after_its_last_response():
    with with_fake_triton(fake_utilities(), "backends.replies") as (replies,):
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
            asking.join(PATIENCE)
            assert not asking.is_alive() and not failures
            asked = request.asked
            assert sender.is_cancelled is False and request.asked == asked


def test_an_answer_is_returned_until_its_request_is_deferred_and_small_ones_alone_unless_they_are_many():
    with with_fake_triton(fake_utilities(), "backends.replies") as (replies,):
        requests, held = [fake_triton.Request({}, {}) for _ in range(6)], Held("toy")
        call = replies.Call(requests, held)
        returned, deferred, large, half, second_half, refused = call.senders
        deferred.defer()
        for sender, count in ((returned, 1), (deferred, 1), (large, LARGE), (half, LARGE // 2), (second_half, LARGE // 2)):
            assert held._count
            replies.send_outputs(sender, {"SCORE": np.zeros(count, dtype=np.uint8)})
        refusals = replies.Refusals("testing")
        refusals.put(refused, Draining("soon"))
        assert [response is not None for response in call.responses()] == [True, False, False, True, False, True]
        assert all(requests[number].next() for number in (1, 2, 4)) and not held._count
        refusals.close()


class Refusals:
    def __init__(self):
        self.errors = []

    def put(self, sender, error):
        self.errors.append(error)


@pytest.fixture(params=["hplm_lookup", "hplm_generate"])
def model(request):
    """Returns a model without what serves, and what it has counted."""

    def fails():
        raise Internal("it does not move")

    with with_fake_triton(fake_utilities(), "backends.replies", f"backends.{request.param}.model") as (_, module):
        model, counted = module.TritonPythonModel.__new__(module.TritonPythonModel), Counter()
        model._held, model._refusals = Held("toy"), Refusals()
        model._service = SimpleNamespace(
            check=fails, count=lambda outcome: counted.update([outcome]), submit=lambda requests: None
        )
        model._client = SimpleNamespace(workers=model._service, submit=lambda requests: None)
        model._count = lambda outcome: counted.update([outcome])
        model.replies = module.replies
        yield model, counted


@pytest.mark.parametrize(
    ("asked", "drains", "kind", "counts"),
    [
        ({"hplm_probe": True}, False, Internal, {}),
        ({"hplm_probe": True}, True, Draining, {}),
        ({"tenant": "acme"}, True, Draining, {"draining": 1}),
    ],
)
def test_a_request_that_is_refused_counts_and_a_probe_counts_nowhere(model, monkeypatch, asked, drains, kind, counts):
    model, counted = model
    monkeypatch.setattr(model.replies, "DRAIN", SimpleNamespace(begun=drains))
    model.execute([fake_triton.Request({}, asked)])
    assert [type(error) for error in model._refusals.errors] == [kind]
    assert counted == counts and model._held._count == sum(counts.values())
