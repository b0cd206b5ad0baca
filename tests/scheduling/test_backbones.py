"""Several backbones in one line: batches of one backbone, costs by backbone, and turns in which none waits for ever."""

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from hplm.errors import DeadlineMissed
from hplm.scheduling.columns import NEVER
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import LEAD_NS, Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import SimulatedText

MS = 1_000_000
ROOM = Capacity(100, 8, 4)


def scheduler_of(given_policy="timely", backbones=2, **options):
    return Scheduler([policy(given_policy) for _ in range(backbones)], Limits(10**6, 10**9), **options)


def text(backbone, tokens=10, arrival=0, deadline=0, number=0, tenant=None, priority=0):
    own = backbone if tenant is None else tenant
    times = {"arrival_ns": arrival, "deadline_ns": deadline}
    return SimulatedText(tokens=tokens, **times, tenant=own, slot_key=own, backbone=backbone, number=number, priority=priority)


def run(scheduler, batch, now, took):
    scheduler.started(batch, now)
    scheduler.finished(batch, now + took)
    return now + took


def test_the_earliest_deadline_goes_first_then_the_oldest_text_and_priorities_count_within_a_tenant():
    scheduler = scheduler_of()
    scheduler.offer([text(0, arrival=1)], 1)
    scheduler.offer([text(1, arrival=2)], 2)
    scheduler.offer([text(1, arrival=3, deadline=10**12), text(1, arrival=3, priority=1)], 3)
    scheduler.offer([text(0, arrival=4, deadline=10**11)], 4)
    scheduler.offer([text(0, arrival=5, deadline=10**13, priority=1)], 5)
    order = []
    while batch := scheduler.choose(Capacity(10, 1, 1, in_flight=9), 6):
        order.append((batch.backbone, batch.texts[0].priority, batch.texts[0].deadline_ns))
    assert order == [(0, 1, 10**13), (0, 0, 10**11), (1, 1, 0), (1, 0, 10**12), (0, 0, 0), (1, 0, 0)]


def test_the_oldest_waiting_text_of_a_backbone_is_known_also_when_its_batch_was_halved():
    scheduler = scheduler_of()
    scheduler.offer([text(0, arrival=7)], 7)
    scheduler.offer([text(1, arrival=3), text(1, arrival=3)], 8)
    assert [scheduler.waiting(backbone) for backbone in (0, 1)] == [(1, 0, 7), (2, 0, 3)]
    batch = scheduler.choose(Capacity(20, 2, 1, in_flight=9), 9)
    assert batch.backbone == 1 and scheduler.waiting(1) == (0, 0, NEVER)
    assert scheduler.halve(batch, batch.texts, 10) and scheduler.waiting(1) == (2, 0, 3)


def teach(scheduler, slow=4):
    """Lets it learn: a batch of the second backbone takes so many times as long. Returns the time then."""
    now = 0
    for number in range(40):
        backbone = number % 2
        scheduler.offer([text(backbone, 50 + number) for _ in range(2)], now)
        batch = scheduler.choose(Capacity(10**4, 100, 100), now)
        now = run(scheduler, batch, now, int((10 + batch.tokens / 10) * MS) * (slow if backbone else 1))
    return now


def learned():
    scheduler = scheduler_of(admission=True)
    return scheduler, teach(scheduler)


def halved(scheduler, batch, now, number):
    assert scheduler.halve(batch, batch.texts, now)
    for half in [scheduler.choose(ROOM, now) for _ in range(2)]:
        now = run(scheduler, half, now, 10 * MS)
    return now


def not_run(scheduler, batch, now, number):
    scheduler.dropped(batch, now)
    return now


def failed(scheduler, batch, now, number):
    scheduler.started(batch, now)
    scheduler.dropped(batch, now + 20 * MS)
    return now + 20 * MS


def long_at_times(scheduler, batch, now, number):
    return run(scheduler, batch, now, 20 * MS if number % 5 else 100 * MS)


def as_expected(scheduler, batch, now, number):
    return run(scheduler, batch, now, 20 * MS)


@pytest.mark.parametrize(
    ("end", "deadline_ms", "priority"),
    [
        *((as_expected, *urgent) for urgent in ((0, 0), (60, 0), (60, 1))),
        *((end, 0, 1) for end in (halved, not_run, failed, long_at_times)),
    ],
)
def test_no_backbone_waits_for_ever_and_a_turn_counts_the_time_that_batches_took(end, deadline_ms, priority):
    """Texts of backbone 0 always wait, and are always more urgent, or as old. Backbone 1 gets half of the engine."""
    scheduler, used = scheduler_of("edf"), [0, 0]
    now = 0 if end is as_expected else teach(scheduler)
    scheduler.offer([text(1, 20, now) for _ in range(1000)], now)
    for number in range(100):
        deadline = deadline_ms and now + deadline_ms * MS
        scheduler.offer([text(0, 20, now, deadline, priority=priority) for _ in range(5)], now)
        batch = scheduler.choose(ROOM, now)
        ended = run(scheduler, batch, now, 20 * MS) if batch.backbone else end(scheduler, batch, now, number)
        used[batch.backbone] += ended - now
        now = ended
        scheduler.expired(now)
    assert abs(used[0] - used[1]) <= LEAD_NS + (40 if end is as_expected else 100) * MS


def test_a_turn_counts_running_batches_as_long_as_expected():
    scheduler, now = learned()
    room = Capacity(3000, 100, 100, in_flight=3)
    scheduler.offer([text(0, 2000, now, priority=1) for _ in range(2)], now)  # 210 ms each
    scheduler.offer([text(1, 10, now)], now)
    assert [scheduler.choose(room, now).backbone for _ in range(3)] == [0, 1, 0]


def test_an_idle_time_gives_no_right_to_catch_up():
    scheduler, now = scheduler_of("fcfs"), 0
    for _ in range(50):
        scheduler.offer([text(0, 100)], now)
        now = run(scheduler, scheduler.choose(ROOM, now), now, 50 * MS)
    scheduler.offer([text(0, 100, now) for _ in range(40)], now)
    scheduler.offer([text(1, 100, now) for _ in range(40)], now)
    found = Counter()
    for _ in range(40):
        batch = scheduler.choose(ROOM, now)
        found[batch.backbone] += 1
        now = run(scheduler, batch, now, 50 * MS)
    assert abs(found[0] - found[1]) <= 4


def test_the_next_backbone_is_tried_if_the_policy_chooses_none_of_the_first():
    class OnlyTheSecond:
        def select(self, columns, start_ns, capacity, cost):
            return np.arange(len(columns)) if columns.text(0).backbone == 1 else np.empty(0, np.int64)

    scheduler = Scheduler([OnlyTheSecond(), OnlyTheSecond()], Limits(10**6, 10**9))
    scheduler.offer([text(0, arrival=0, deadline=10**12)], 0)
    scheduler.offer([text(1, arrival=1, deadline=10**13)], 1)
    batch = scheduler.choose(ROOM, 2)
    assert batch is not None and batch.backbone == 1


def test_admission_knows_the_time_of_each_backbone_and_counts_the_whole_line():
    scheduler, now = learned()
    scheduler.offer([text(0, 100, now, now + 40 * MS)], now)  # takes 20 ms
    with pytest.raises(DeadlineMissed):
        scheduler.offer([text(1, 100, now, now + 70 * MS)], now)  # takes 80 ms
    with pytest.raises(DeadlineMissed):
        scheduler.offer([text(1, 100, now, now + 90 * MS)], now)  # which begin when the other text is done
    scheduler.offer([text(1, 100, now, now + 130 * MS)], now)
    with pytest.raises(DeadlineMissed):  # the line has 100 ms of work
        scheduler.offer([text(0, 100, now, now + 60 * MS)], now)


def test_what_a_backbone_that_has_computed_nothing_would_need_is_not_guessed():
    scheduler = scheduler_of(admission=True)
    scheduler.offer([text(0)], 0)
    scheduler.started(scheduler.choose(ROOM, 0), 0)
    scheduler.offer([text(1, 4000, 1, 2)], 1)  # it may be in time for all that is known


def test_batches_of_a_backbone_follow_each_other_more_slowly_while_another_one_is_busy():
    room, admitted = Capacity(100, 10, 10), []
    for others in (0, 50):
        scheduler, now = scheduler_of(admission=True), 0
        scheduler.offer([text(0, 40 + number % 10) for number in range(60)], now)
        while batch := scheduler.choose(room, now):
            now = run(scheduler, batch, now, batch.tokens * MS // 10)
        scheduler.offer([text(1, 50, now) for _ in range(others)] or [text(0, 1, now)], now)
        scheduler.dropped(scheduler.choose(room, now), now)
        count = 0
        with suppress(DeadlineMissed):
            while count < 100:
                scheduler.offer([text(0, 50, now, now + 100 * MS)], now)
                count += 1
        admitted.append(count)
    assert 15 <= admitted[0] <= 20 and admitted[0] / 2 - 2 <= admitted[1] <= admitted[0] / 2 + 2


def test_a_late_text_is_dropped_by_the_time_of_its_own_backbone():
    scheduler, now = learned()
    scheduler.offer([text(0, 100, now, now + 25 * MS, 1)], now)
    scheduler.offer([text(1, 100, now, now + 150 * MS, 2)], now)
    assert [own.number for own in scheduler.expired(now + 10 * MS)] == [1]  # takes 20 ms
    assert not scheduler.expired(now + 40 * MS)
    assert [own.number for own in scheduler.expired(now + 80 * MS)] == [2]  # takes 80 ms
