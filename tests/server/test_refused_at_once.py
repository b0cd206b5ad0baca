"""Requests that the model `hplm` has forwarded are refused at once when lookup's line is full, others later."""

import os
import time

from hplm.engine import lookup_service
from hplm.engine.lookup import Lookup
from hplm.engine.lookup_service import A_TEXT, AT_ONCE
from hplm.request.form import Form
from hplm.scheduling.limits import Limits
from hplm.tenants.arrival import FORWARDED, Mark
from testing.toy import WORDS
from tests.support.fake_triton import Request, model_of
from tests.support.servers import server_environment
from tests.support.wait import Hold

PLACES, REFUSED = 2, 4


def test_forwarded_requests_are_refused_before_a_request_is_looked_up(toy, monkeypatch):
    """Refusals to others are kept until requests are looked up: a client that asks again at once gains nothing."""
    hold, read = Hold(), Lookup.read
    monkeypatch.setattr(Lookup, "read", lambda *given: hold.pass_through() or read(*given))
    monkeypatch.setattr(lookup_service, "WAITING", Limits(items=PLACES, work=1 << 20))
    for pause in ("LEAST_PAUSE", "LONGEST_PAUSE"):  # seconds until a kept refusal is sent although nothing was looked up
        monkeypatch.setattr(lookup_service, pause, 1e6)
    with server_environment(monkeypatch), model_of(toy.repository, "toy-lookup", "hplm_lookup") as model, hold:

        def ask(texts=1, **parameters):
            request = Request({"TEXT": [WORDS[0]] * texts}, {"tenant": "acme", **parameters})
            model.execute([request])
            return request

        served = [ask(texts=AT_ONCE // A_TEXT + 1)]  # too much for the thread that brings it
        hold.until_reached()
        served += [ask() for _ in range(PLACES)]
        kept = [ask(**{FORWARDED: forged}) for forged in ("", "0" * 64, True)] + [ask() for _ in range(REFUSED)]
        for forwarded in [ask(**Mark(os.getppid()).parameters(0)) for _ in range(REFUSED)]:
            assert forwarded.next().startswith("[queue_full]")
        assert not any(one.is_answered for one in served + kept)
        asked_ns = time.monotonic_ns()
        hold.open()
        for one in served:  # deadlines count from when Triton handed it over, not from when lookup got round to it
            assert Form(bytearray(one.next()["TICKET"])).head.arrival_ns < asked_ns
        assert all(one.next().startswith("[queue_full]") for one in kept)
