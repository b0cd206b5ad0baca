"""Batches that are computed in parts: by several stacks, or some of their texts twice."""

from dataclasses import replace

import pytest

from hplm.errors import DeadlineMissed
from hplm.scheduling.admission import Admission
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity

ROOM = Capacity(tokens=100, texts=10, tenants=3)
BATCH_NS = 10**12  # no test waits so long


def _scheduler(admission=True):
    return Scheduler(policy("timely"), Limits(1000, 10**6), admission)


def _started(scheduler, texts, now=0):
    """Returns a batch with these texts that has just started."""
    scheduler.offer(texts, now)
    batch = scheduler.choose(ROOM, now)
    scheduler.started(batch, now)
    return batch


def _text(tokens=10, deadline=0):
    return SimulatedText(tokens=tokens, arrival_ns=0, deadline_ns=deadline)


@pytest.fixture
def judged(monkeypatch):
    """Returns how many promised texts were on time and how many late, of each batch."""
    found = []
    monkeypatch.setattr(Admission, "done", lambda admission, on_time, late: found.append((on_time, late)))
    return found


def test_each_text_is_judged_by_the_time_of_its_own_first_pass(judged):
    scheduler = _scheduler()
    sure, goes_on, late, _, free = texts = [_text(deadline=one) for one in (1500, 1500, 900, 2500, 0)]
    batch = _started(scheduler, texts)
    scheduler.computed(batch, [sure, goes_on, late, free], 1000)
    assert scheduler.going_on(batch, [goes_on], 1000) == [goes_on]
    scheduler.computed(batch, [goes_on], 2000)
    scheduler.finished(batch, 3000)
    assert judged == [(2, 2)]


def test_a_part_takes_what_a_batch_takes_whatever_is_in_it():
    """Texts on two stacks are two parts. Those of the first one that go on are computed with the second one."""

    def learned(goes_on):
        scheduler, now = _scheduler(admission=False), 0
        for number in range(200):
            texts = [_text(tokens=10 + number % 3) for _ in range(2 + number % 4)]
            batch = _started(scheduler, texts, now)
            parts = [texts[:1], texts[1:]] if number % 2 else [texts]
            again = texts[:1] if goes_on and number % 2 else []
            scheduler.computed(batch, parts[0], now)
            assert scheduler.going_on(batch, again, now) == again
            for part in parts[1:]:
                scheduler.computed(batch, [*again, *part], now)
            took = 3_000_000 * len(parts) + sum(100_000 * text.tokens + 50_000 for text in [*texts, *again])
            scheduler.finished(batch, now + took)
            now += 2 * took
        return scheduler.costs[0].terms[0]

    assert learned(goes_on=False) == pytest.approx(3_000_000, rel=0.1)
    assert learned(goes_on=True) == pytest.approx(3_000_000, rel=0.1)


def _busy():
    """Returns a scheduler that has learned its cost, a batch whose texts were computed, and the time."""
    scheduler, now = _scheduler(), 0
    for _ in range(30):
        batch = _started(scheduler, [_text() for _ in range(10)], now)
        scheduler.computed(batch, batch.texts, now + BATCH_NS)
        now += BATCH_NS
        scheduler.finished(batch, now)
    batch = _started(scheduler, [_text() for _ in range(10)], now)
    scheduler.computed(batch, batch.texts, now)
    return scheduler, batch, now


@pytest.mark.parametrize("tokens", [10, 1000])
def test_admission_knows_that_a_running_batch_takes_longer(tokens):
    scheduler, batch, now = _busy()
    assert len(scheduler.going_on(batch, [replace(text, tokens=tokens) for text in batch.texts], now)) == 10
    request = [_text(deadline=now + 4 * BATCH_NS)]
    if tokens == 10:
        assert scheduler.offer(request, now) == []
        return
    with pytest.raises(DeadlineMissed):
        scheduler.offer(request, now)


def test_computed_texts_go_on_in_their_batch_if_they_are_in_time_there():
    scheduler, running, now = _busy()
    passed, passed_when_they_are_computed, far, none = now - 1, now + 2_000_000, now + 10**13, 0
    deadlines = passed, passed_when_they_are_computed, far, none
    second = [replace(text, tokens=100, deadline_ns=one) for text, one in zip(running.texts[:4], deadlines, strict=True)]
    assert scheduler.going_on(running, second, now) == second[2:]


def test_admission_counts_texts_that_came_back_as_work():
    scheduler, _, now = _busy()
    scheduler.again([_text(deadline=now + 10 * BATCH_NS) for _ in range(20)], now)
    with pytest.raises(DeadlineMissed):
        scheduler.offer([_text(deadline=now + 2 * BATCH_NS)], now)
