"""Engines with several stages: batches in flight, when the next one can start, and what a batch takes."""

from dataclasses import dataclass

import pytest

from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.waiting import Capacity

MS = 10**6


@dataclass(frozen=True, eq=False)
class Text:
    tokens: int = 10
    bytes: int = 1
    arrival_ns: int = 0
    deadline_ns: int = 0
    priority: int = 0
    slot_key: str = "a"
    tenant: int = 1


def room(in_flight):
    return Capacity(tokens=10, texts=10, tenants=10, in_flight=in_flight)


def taught(stages_ns, texts=40):
    """Returns a scheduler with waiting texts, which has seen many batches that took so long in each stage."""
    scheduler = Scheduler(policy("fcfs"), Limits(1000, 10**9), commit_ns=0)
    for _ in range(20):
        scheduler.cost.observe(10, 1, 0, sum(stages_ns), stages_ns=stages_ns)
    scheduler.offer([Text() for _ in range(texts)], 0)
    return scheduler


@pytest.mark.parametrize("in_flight", [2, 3, 5])
def test_no_more_batches_are_chosen_than_may_be_in_flight(in_flight):
    scheduler, capacity = taught([5 * MS] * (in_flight - 1)), room(in_flight)
    batches = [scheduler.choose(capacity, 0) for _ in range(in_flight)]
    assert all(batches) and scheduler.choose(capacity, 0) is None
    scheduler.started(batches[0], 0)
    scheduler.finished(batches[0], 5 * MS)
    scheduler.dropped(batches[1], 5 * MS)
    assert [bool(scheduler.choose(capacity, 5 * MS)) for _ in range(3)] == [True, True, False]


def test_a_half_also_waits_until_there_may_be_another_batch_in_flight():
    scheduler = Scheduler(policy("fcfs"), Limits(1000, 10**9))
    scheduler.offer([Text(5) for _ in range(8)], 0)
    first, second = (scheduler.choose(room(2), 0) for _ in range(2))
    assert scheduler.halve(first, first.texts, 0)
    assert scheduler.choose(room(2), 0).is_half and scheduler.choose(room(2), 0) is None
    scheduler.dropped(second, 0)
    assert scheduler.choose(room(2), 0).is_half


def test_the_next_batch_is_chosen_when_the_first_stage_will_be_free():
    scheduler, capacity = taught([10 * MS, 30 * MS]), room(3)
    first = scheduler.choose(capacity, 0)
    scheduler.started(first, 0)
    assert scheduler.choose_at(0) == pytest.approx(10 * MS, rel=0.02)
    scheduler.released(first, 6 * MS)
    assert scheduler.choose_at(6 * MS) == 6 * MS
    second = scheduler.choose(capacity, 6 * MS)
    scheduler.started(second, 6 * MS)
    scheduler.released(second, 16 * MS)
    third = scheduler.choose(capacity, 16 * MS)
    scheduler.started(third, 16 * MS)
    assert scheduler.choose_at(16 * MS) == pytest.approx(40 * MS, rel=0.02)  # one of the three must be done


def test_a_batch_takes_the_sum_of_its_stages_however_long_it_waits_between_them():
    scheduler, capacity = taught([10 * MS, 30 * MS], texts=60), room(3)
    now = 0
    for _ in range(50):
        batch = scheduler.choose(capacity, now)
        scheduler.started(batch, now)
        now += 500 * MS
        scheduler.finished(batch, now, stages_ns=[10 * MS, 30 * MS])
    assert float(scheduler.cost.predict(10, 1)) == pytest.approx(40 * MS, rel=0.1)
    assert scheduler.cost.slowest == pytest.approx(0.75, rel=0.01) and scheduler.cost.first == pytest.approx(0.25, rel=0.02)


def test_policies_count_batches_by_the_slowest_stage():
    seen = []

    class Watching:
        def select(self, columns, start_ns, capacity, cost):
            seen.append((start_ns, float(cost.predict(10, 1))))
            return policy("fcfs").select(columns, start_ns, capacity, cost)

    scheduler = taught([10 * MS, 30 * MS])
    scheduler._policy = Watching()
    scheduler.choose(room(3), 0)
    ((start_ns, batch_ns),) = seen
    assert batch_ns == pytest.approx(30 * MS, rel=0.02) and start_ns == pytest.approx(10 * MS, rel=0.02)


def test_one_stage_is_the_whole_batch():
    cost = CostModel()
    for _ in range(9):
        cost.observe(10, 1, 0, 20 * MS)
    assert cost.first == cost.slowest == 1 and cost.by_batch() is cost
