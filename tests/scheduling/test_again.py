"""Texts that were computed and join the line again: their first answer is not enough."""

import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from hplm.errors import DeadlineMissed, Draining, QueueFull
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity

ROOM = Capacity(tokens=100, texts=10, tenants=3)
BATCH_NS = 10_000_000


def _text(number=0, tokens=10, deadline=0, tenant=0, size=1):
    return SimulatedText(
        tokens=tokens, bytes=size, arrival_ns=0, deadline_ns=deadline, tenant=tenant, slot_key=tenant, number=number
    )


def _scheduler(texts=100, admission=False, given="timely"):
    return Scheduler(policy(given), Limits(texts, 1000), admission)


def _queue(texts=100):
    """On a clock that goes a microsecond on whenever somebody looks at it."""
    clock = count(1)
    return Queue(_scheduler(texts), lambda: next(clock) * 1000)


def _run(scheduler, now, adapters=0):
    batch = scheduler.choose(ROOM, now)
    scheduler.started(batch, now)
    scheduler.finished(batch, now + BATCH_NS, adapters)
    return batch


def test_texts_come_back_past_limits_and_admission_with_their_deadlines():
    scheduler, now = _scheduler(texts=2, admission=True), 0
    for _ in range(30):
        scheduler.offer([_text()], now)
        _run(scheduler, now)
        now += BATCH_NS
    mine = [_text(1, deadline=now + 10 * BATCH_NS), _text(2)]
    scheduler.offer(mine, now)
    assert _run(scheduler, now).texts == mine
    scheduler.offer([_text(3), _text(4)], now)
    with pytest.raises(QueueFull):
        scheduler.offer([_text(5)], now)
    assert scheduler.again(mine, now) == []
    assert len(scheduler) == 4
    assert scheduler.columns.came_back.tolist() == [False, False, True, True]
    assert scheduler.columns.deadline[2] == mine[0].deadline_ns
    assert {text.number for text in _run(scheduler, now).texts} == {1, 2, 3, 4}


def test_each_text_that_came_back_expires_alone():
    scheduler = _scheduler()
    request = [_text(1, deadline=50), _text(2, deadline=500), _text(3, deadline=500)]
    scheduler.offer(request, 0)
    batch = scheduler.choose(replace(ROOM, texts=2), 0)
    scheduler.started(batch, 0)
    scheduler.finished(batch, 10)
    assert scheduler.again(batch.texts, 10) == []
    assert scheduler.next_expiry(10) == 50
    assert [text.number for text in scheduler.expired(50)] == [1]
    assert {text.number for text in scheduler.expired(500)} == {2, 3}


def test_a_text_that_came_back_may_be_displaced_alone():
    scheduler = _scheduler(texts=4)
    scheduler.offer([_text(i, tenant=1) for i in range(3)], 0)
    batch = _run(scheduler, 0)
    scheduler.offer([_text(3, tenant=1), _text(4, tenant=1)], 0)
    scheduler.again(batch.texts[:2], 0)
    assert scheduler.offer([_text(5, tenant=2)], 0) == batch.texts[1:2]


@pytest.mark.parametrize("came_back", [False, True])
def test_admission_counts_texts_that_came_back_as_work(came_back):
    scheduler, _, now = _busy()
    waiting = [_text(deadline=now + 10 * BATCH_NS) for _ in range(20)]
    if came_back:
        scheduler.again(waiting, now)
    else:
        scheduler.offer(waiting, now)
    with pytest.raises(DeadlineMissed):
        scheduler.offer([_text(deadline=now + 2 * BATCH_NS)], now)


@pytest.mark.parametrize("fate", ["expired", "late"])
def test_admission_promises_the_first_pass_only(fate):
    """Second passes that come too late change nothing about how many requests are let in. First passes do."""

    def let_in(late_are_first):
        scheduler, running, now = _busy()
        for _ in range(40):
            texts = [_text(deadline=now + (1 if fate == "expired" else 3 * BATCH_NS)) for _ in range(10)]
            if late_are_first:
                scheduler.columns.add(texts)
            else:
                scheduler.again(texts, now)
            if fate == "expired":
                assert scheduler.expired(now + 2) == texts
                continue
            scheduler.finished(running, now + BATCH_NS)
            running = scheduler.choose(ROOM, now + BATCH_NS)
            assert running.texts == texts
            scheduler.started(running, now + BATCH_NS)
            now += 4 * BATCH_NS
        for admitted in count():
            try:
                scheduler.offer([_text(deadline=now + 5 * BATCH_NS)], now)
            except DeadlineMissed:
                return admitted

    assert let_in(late_are_first=False) > 1.3 * let_in(late_are_first=True) > 0


def _busy():
    """Returns a scheduler that has learned its cost, a batch that has just started, and the time."""
    scheduler, now = Scheduler(policy("timely"), Limits(1000, 10**6), admission=True), 0
    for _ in range(30):
        scheduler.offer([_text() for _ in range(11)], now)
        _run(scheduler, now)
        now += BATCH_NS
        scheduler.abandon()
    scheduler.offer([_text() for _ in range(10)], now)
    running = scheduler.choose(ROOM, now)
    scheduler.started(running, now)
    return scheduler, running, now


def test_computed_texts_go_on_in_their_batch_if_they_are_in_time_there():
    scheduler, running, now = _busy()
    passed, passed_when_they_are_computed, far, none = now - 1, now + 2_000_000, now + 10**9, 0
    deadlines = passed, passed_when_they_are_computed, far, none
    second = [replace(text, tokens=100, deadline_ns=one) for text, one in zip(running.texts[:4], deadlines, strict=True)]
    assert scheduler.going_on(running, second, now) == second[2:]


def test_while_a_crowd_waits_computed_texts_are_for_the_line():
    scheduler, running, now = _busy()
    scheduler.offer([_text() for _ in range(ROOM.texts)], now)
    assert scheduler.going_on(running, running.texts, now) == running.texts
    scheduler.offer([_text()], now)
    assert scheduler.going_on(running, running.texts, now) == []


def test_texts_of_a_smaller_batch_for_which_there_is_memory_are_for_the_line():
    scheduler, running, now = _busy()
    assert scheduler.halve(running, running.texts, now)
    half = scheduler.choose(ROOM, now)
    scheduler.started(half, now)
    assert scheduler.going_on(half, half.texts, now) == []


def test_a_batch_is_as_long_as_all_that_is_computed_in_it():
    """The cost model learns the same from texts that are computed twice in their batch as from longer ones."""

    def learned(again):
        scheduler, now = _scheduler(), 0
        for number in range(200):
            count, tokens = 1 + number % 4, 10 + number % 3
            scheduler.offer([_text(tokens=tokens) for _ in range(count)], now)
            batch = scheduler.choose(ROOM, now)
            scheduler.started(batch, now)
            goes_on = scheduler.going_on(batch, batch.texts, now + 1) if again and number % 2 else []
            for part in filter(None, (batch.texts, goes_on)):
                scheduler.computed(batch, part, now + 1)
            took = 1_000_000 * batch.parts + sum(100_000 * text.tokens + 50_000 for text in [*batch.texts, *goes_on])
            scheduler.finished(batch, now + took)
            now += 2 * took
        return scheduler.costs[0].predict(100, 8)

    assert learned(again=True) == pytest.approx(learned(again=False), rel=0.02)


def test_halves_that_were_given_up_do_not_run():
    scheduler = _scheduler()
    scheduler.offer([_text(1), _text(2)], 0)
    batch = scheduler.choose(ROOM, 0)
    assert scheduler.halve(batch, batch.texts, 0)
    assert len(scheduler.abandon()) == 2 and not len(scheduler) and scheduler.choose(ROOM, 0) is None


def test_what_is_left_of_a_batch_runs_alone_with_its_own_promises():
    """The texts of a shallow stack were computed; the device has no memory for those of a deep one."""
    scheduler = _scheduler()
    scheduler.offer([_text(number, deadline=(number + 1) * 10**12) for number in range(3)], 0)
    batch = scheduler.choose(ROOM, 0)
    left = batch.texts[1:2]
    assert scheduler.halve(batch, left, 0)
    rest = scheduler.choose(ROOM, 0)
    assert rest.texts == left and rest.promised.tolist() == [left[0].deadline_ns]
    assert not scheduler.halve(rest, rest.texts, 0) and scheduler.choose(ROOM, 0) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_that_closes_answers_every_text_once(seed):
    """Threads offer, compute, expire and close. Half of the texts come back, some of them several times."""
    rng, left, lock, queue = random.Random(seed), Counter(), threading.Lock(), _queue(texts=40)
    closes_after = rng.randrange(200)

    def leave(texts):
        with lock:
            left.update(text.number for text in texts)

    def compute():
        while (batch := queue.take(ROOM)) is not None:
            queue.started(batch)
            queue.finished(batch)
            back = [text for text in batch.texts if rng.random() < 0.5]
            leave([text for text in batch.texts if text not in back])
            leave(queue.again(back))

    def expire():
        while (texts := queue.expired()) is not None:
            leave(texts)

    threads = [threading.Thread(target=work, daemon=True) for work in (compute, expire)]
    for thread in threads:
        thread.start()
    for number in range(200):
        if number == closes_after:
            queue.close()
        text = _text(number, deadline=rng.choice([0, number * 1000 + 10**6]), tenant=number % 3)
        try:
            leave(queue.offer([text]))
        except (Draining, QueueFull):
            leave([text])
    queue.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert left == Counter(range(200)) and not len(queue)


def test_a_closed_queue_ends_though_a_batch_still_runs():
    """A text that comes back later is refused, so there is nothing to wait for."""
    queue = _queue()
    queue.offer([_text(1), _text(2)])
    batch = queue.take(ROOM)
    queue.close()
    assert queue.take(ROOM) is None and queue.expired() is None
    queue.started(batch)
    queue.finished(batch)
    assert queue.again(batch.texts) == batch.texts


def test_a_text_that_comes_back_wakes_a_waiting_thread():
    queue = _queue()
    queue.offer([_text(1)])
    batch = queue.take(ROOM)
    queue.started(batch)
    queue.finished(batch)
    taken = []
    taker = threading.Thread(target=lambda: taken.append(queue.take(ROOM)), daemon=True)
    taker.start()
    assert queue.again(batch.texts) == []
    taker.join(10)
    assert taken[0].texts == batch.texts
