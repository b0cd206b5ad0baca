"""Counts of requests by what their clients got."""

import pytest

from hplm.metrics import names
from hplm.metrics.meter import Meter
from hplm.metrics.outcomes import BUSIEST, Outcomes


@pytest.fixture
def outcomes():
    return Outcomes(Meter())


def settled(outcomes):
    outcomes.settle()
    return outcomes.meter.take()[0]


def test_deadlines_of_answered_and_refused_requests_are_counted(outcomes):
    ended = ("on_time", "deadline", "draining", "answered")
    outcomes.count([("law", "acme", outcome) for outcome in ended], [0.05, 0.15, 0.15])
    counts = settled(outcomes)
    bucket, total, number = names.DEADLINE_SECONDS.parts
    assert counts[number, ()] == 3
    assert counts[total, ()] == pytest.approx(0.35)
    assert [counts[bucket, (bound,)] for bound in ("0.02", "0.05", "0.1", "0.2", "+Inf")] == [0, 1, 1, 3, 3]
    assert counts[names.REQUESTS, ("law", "on_time")] == counts[names.TENANT_REQUESTS, ("acme", "answered")] == 1


def test_only_the_busiest_tenants_have_series(outcomes):
    outcomes.count([("law", f"t{number}", "answered") for number in range(BUSIEST + 2)], [])
    counts = settled(outcomes)
    assert counts[names.TENANT_REQUESTS, ("", "answered")] == 2 and counts[names.REQUESTS, ("law", "answered")] == BUSIEST + 2
    of_tenants = [names.TENANT_REQUESTS, ("t0", "answered")], [names.EXIT_AGREEMENT, (f"t{BUSIEST}", "1")]
    assert [outcomes.keeps((metric, labels)) for metric, labels in of_tenants] == [True, False]
    assert outcomes.keeps((names.REQUESTS, ("law", "answered"))) and outcomes.keeps((names.TENANT_REQUESTS, ("", "answered")))


@pytest.mark.parametrize("deadline_ns, outcome", [(0, "answered"), (5, "on_time"), (4, "late")])
def test_an_answer_in_time_is_told_from_a_late_one(deadline_ns, outcome):
    assert names.outcome(deadline_ns, 5) == outcome
