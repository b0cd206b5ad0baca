"""Engines with several stages: batches in flight, when the next one can start, and what a batch takes."""

import pytest

from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import SimulatedText

MS = 10**6


def room(in_flight):
    return Capacity(tokens=10, texts=10, tenants=10, in_flight=in_flight)


def taught(stages_ns, texts=40, chooses=None, answering_ns=0):
    """Returns a scheduler with waiting texts, which has seen many batches that took so long in each stage."""
    scheduler = Scheduler(chooses or policy("fcfs"), Limits(1000, 10**9), commit_ns=0, answering_ns=answering_ns)
    for _ in range(20):
        scheduler.cost.observe(10, 1, 0, sum(stages_ns), stages_ns=stages_ns)
    scheduler.offer([SimulatedText(tokens=10, arrival_ns=0) for _ in range(texts)], 0)
    return scheduler


@pytest.mark.parametrize(("in_flight", "free_ms"), [(3, 30), (1, 40)])
def test_the_next_batch_is_chosen_when_the_first_stage_will_be_free_and_another_may_be_in_flight(in_flight, free_ms):
    scheduler, capacity = taught([30 * MS, 10 * MS]), room(in_flight)
    scheduler.started(scheduler.choose(capacity, 0), 0)
    assert scheduler.choose_at(0) == pytest.approx(free_ms * MS, rel=0.02)
    assert scheduler.choose_at((free_ms + 5) * MS) == (free_ms + 5) * MS


def test_the_next_batch_is_chosen_so_late_that_it_does_not_wait_between_the_stages():
    scheduler, capacity = taught([10 * MS, 30 * MS]), room(3)
    first = scheduler.choose(capacity, 0)
    scheduler.started(first, 0)
    assert scheduler.choose_at(0) == pytest.approx(30 * MS, rel=0.02)  # the second stage is free at 40
    assert scheduler.choose(capacity, 25 * MS) is None and scheduler.due(25 * MS) == scheduler.choose_at(0)
    second = scheduler.choose(capacity, 31 * MS)
    scheduler.started(second, 31 * MS)
    assert scheduler.choose_at(31 * MS) == pytest.approx(60 * MS, rel=0.03)  # two batches of 30 from 10 on, less 10
    scheduler.finished(first, 50 * MS, stages_ns=[10 * MS, 30 * MS])
    assert scheduler.choose_at(50 * MS) == pytest.approx(70 * MS, rel=0.02)  # the second one has begun there at 50
    assert scheduler.choose_at(90 * MS) == 90 * MS


def test_a_batch_takes_the_sum_of_its_stages_however_long_it_waits_between_them():
    scheduler, capacity = taught([10 * MS, 30 * MS], texts=60), room(3)
    now = 0
    for _ in range(50):
        batch = scheduler.choose(capacity, now)
        scheduler.started(batch, now)
        now += 500 * MS
        scheduler.finished(batch, now, stages_ns=[10 * MS, 30 * MS])
    cost = scheduler.cost
    assert float(cost.predict(10, 1)) == pytest.approx(40 * MS, rel=0.1)
    assert cost.shares == pytest.approx([0.25, 0.75], rel=0.02) and cost.slowest == cost.shares[1]


def test_policies_count_batches_by_the_slowest_stage_and_leave_time_for_the_answer():
    """Policies compare deadlines with the end of computing; clients wait for the answer."""
    seen = []

    class Watching:
        def select(self, columns, start_ns, capacity, cost):
            seen.append((start_ns, float(cost.predict(10, 1))))
            return policy("fcfs").select(columns, start_ns, capacity, cost)

    taught([10 * MS, 30 * MS], chooses=Watching(), answering_ns=5 * MS).choose(room(3), 0)
    ((start_ns, batch_ns),) = seen
    assert batch_ns == pytest.approx(30 * MS, rel=0.02) and start_ns == pytest.approx(15 * MS, rel=0.02)


def test_batches_whose_slowest_stages_differ_do_not_make_the_slowest_one_slower():
    cost = CostModel()
    for i in range(200):
        cost.observe(10, 1, 0, 40 * MS, stages_ns=[16 * MS, 24 * MS] if i % 2 else [24 * MS, 16 * MS])
    assert cost.slowest == pytest.approx(0.5, abs=0.02)
