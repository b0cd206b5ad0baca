"""Counts of requests that leave the engine."""

from types import SimpleNamespace

import pytest

from hplm.engine.instruments import Instruments
from hplm.engine.journal import NONE, Journal
from hplm.errors import DeadlineMissed, Draining
from hplm.metrics import names


def leave(instruments: Instruments, seconds: float | None, answer) -> None:
    arrival_ns = 10**9
    deadline_ns = arrival_ns + int(seconds * 1e9) if seconds else 0
    tenant = SimpleNamespace(id="acme", version=1, domain="law")
    instruments.left(SimpleNamespace(tenant=tenant, arrival_ns=arrival_ns, deadline_ns=deadline_ns), answer)


@pytest.fixture
def instruments(monkeypatch):
    monkeypatch.setattr(Journal, "request", lambda *_: None)
    instruments = Instruments(Journal(NONE, "toy"))
    yield instruments
    instruments.close()


def test_deadlines_of_answered_and_refused_requests_are_counted(instruments):
    leave(instruments, 0.05, ())
    leave(instruments, 0.15, DeadlineMissed("the queue is too long"))
    leave(instruments, 0.15, Draining("the server is being stopped"))
    leave(instruments, None, ())
    counts, _ = instruments.meter.take()
    bucket, total, number = names.DEADLINE_SECONDS.parts
    assert counts[number, ()] == 3
    assert counts[total, ()] == pytest.approx(0.35)
    assert [counts[bucket, (bound,)] for bound in ("0.02", "0.05", "0.1", "0.2", "+Inf")] == [0, 1, 1, 3, 3]
