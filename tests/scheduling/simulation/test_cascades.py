"""Cascades on the virtual clock: the real scheduler and its governor, and texts whose first answer may not be enough."""

import numpy as np
import pytest

from hplm.scheduling.columns import NEVER
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import Lengths, Stream
from hplm.scheduling.simulation.cascades import SimulatedRung
from hplm.scheduling.simulation.engines import EngineCost, one_stage
from hplm.scheduling.simulation.server import ANSWERED, EXPIRED, REFUSED, Machine, Simulation
from hplm.scheduling.waiting import Capacity

pytestmark = pytest.mark.slow

CAPACITY = Capacity(1280, 1280, 1280)
COST = EngineCost(score=0)
LENGTHS = Lengths(40, 100)
TEXTS_A_SECOND = 32 / COST.packed(np.full(32, 40)) * 1e9
LADDER = (
    SimulatedRung(1.0, right=0.92),
    SimulatedRung(0.25, 1.0, goes_on=0.3, right=0.915, right_in_hand=0.7),
    SimulatedRung(0.25, 1.0, goes_on=0.1, right=0.89, right_in_hand=0.75),
    SimulatedRung(0.25, right=0.84),
)


def _load(rate, seconds=6.0, allowed_ms=(50.0, 300.0), tenants=(0,), seed=1, cv=1.0):
    return Stream(rate * TEXTS_A_SECOND, seconds, LENGTHS, allowed_ms, cv, tenants).draw(seed)


def _run(load, ladders, admission=True, within=True):
    scheduler = Scheduler(policy("timely"), Limits(10**6, 10**9), admission, 0)
    return Simulation(
        scheduler, Machine(one_stage(COST.packed), CAPACITY, noise=0.05, within=within), load, ladders=ladders
    ).run()


@pytest.mark.parametrize("admission", [True, False])
@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_every_text_has_exactly_one_fate(rate, admission):
    load = _load(rate, 1.0, tenants=range(3))
    outcome = _run(load, {0: LADDER, 1: LADDER[1:]}, admission)
    assert set(np.unique(outcome.fate)) <= {REFUSED, EXPIRED, ANSWERED}
    assert ((outcome.answered_ns < NEVER) == outcome.answered).all()
    assert not outcome.right[~outcome.answered].any() and not outcome.rung[load.tenant == 2].any()


def test_a_second_pass_costs_what_it_says():
    """At a load that never waits, a third of the texts take a second pass."""
    load = _load(0.2)
    plain, cascade = (_run(load, {0: [rung]}) for rung in (SimulatedRung(), SimulatedRung(0.25, 1.0, goes_on=0.3)))
    assert plain.answered.all() and cascade.answered.all()
    assert sum(cascade.batches) / sum(plain.batches) == pytest.approx(0.55, abs=0.03)


def test_at_three_times_the_load_more_is_right_and_in_time_than_by_the_dearest_rung():
    """Takes seconds: every text of six seconds at three times the load is chosen, twice."""
    load = _load(3.0, tenants=range(20))
    governed, dearest = (_run(load, dict.fromkeys(range(20), ladder)) for ladder in (LADDER, LADDER[:1]))
    right_in_time = [(outcome.right & outcome.on_time).sum() for outcome in (governed, dearest)]
    assert right_in_time[0] >= 1.3 * right_in_time[1] > 0


def test_requests_that_are_refused_or_expire_are_a_crowd_too():
    """With deadlines of about a batch, no more than a batch ever waits."""
    load = _load(3.0, allowed_ms=(25.0, 40.0))
    outcome = _run(load, {0: LADDER})
    assert outcome.rung[len(load) // 2 :].min() >= 2
