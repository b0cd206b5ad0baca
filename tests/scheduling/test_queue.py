"""The line between threads: whoever waits is woken, and a line that closes gives every text back once."""

import random
import threading
from collections import Counter
from itertools import count

import pytest

from hplm.errors import Draining, QueueFull
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity
from tests.support.wait import PATIENCE, Clock

ROOM = Capacity(tokens=100, texts=10, tenants=3)


def _text(number=0, deadline=0, tenant=0):
    times = {"arrival_ns": 0, "deadline_ns": deadline}
    return SimulatedText(tokens=10, bytes=1, **times, tenant=tenant, slot_key=tenant, number=number)


def _queue(clock, texts=100, admission=False):
    return Queue(Scheduler(policy("timely"), Limits(texts, 1000), admission), clock)


class Waiting:
    """A thread that waits for what a call returns."""

    def __init__(self, call):
        self._found = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()), daemon=True)
        self._thread.start()

    def result(self):
        self._thread.join(PATIENCE)
        return self._found[0]


def test_a_text_that_comes_wakes_who_takes_a_batch():
    queue, text = _queue(Clock(1e-9)), _text()
    taker = Waiting(lambda: queue.take(ROOM))
    assert queue.offer([text]) == []
    assert taker.result().texts == [text]


def test_an_expired_text_and_the_end_wake_who_answers_them():
    clock = Clock(1e-9)
    queue, late = _queue(clock), _text(deadline=5)
    waiter = Waiting(queue.expired)
    queue.offer([_text()])
    clock.seconds = 5e-9
    queue.offer([late])
    assert waiter.result() == [late]
    waiter = Waiting(queue.expired)
    queue.close()
    with pytest.raises(Draining):
        queue.offer([_text()])
    batch = queue.take(ROOM)
    assert len(batch.texts) == 1 and queue.take(ROOM) is None and waiter.result() is None
    queue.started(batch)
    clock.sleep(0.001)
    queue.finished(batch)


@pytest.mark.parametrize("seed", range(3))
def test_a_queue_that_closes_answers_every_text_once(seed):
    """Threads offer, compute, expire and close."""
    ticks = count(1)  # a clock that goes a microsecond on whenever somebody looks at it
    rng, left, lock, queue = random.Random(seed), Counter(), threading.Lock(), _queue(lambda: next(ticks) * 1000, texts=40)
    closes_after = rng.randrange(200)

    def leave(texts):
        with lock:
            left.update(text.number for text in texts)

    def compute():
        while (batch := queue.take(ROOM)) is not None:
            queue.started(batch)
            queue.finished(batch)
            leave(batch.texts)

    def expire():
        while (texts := queue.expired()) is not None:
            leave(texts)

    threads = [Waiting(work) for work in (compute, expire)]
    for number in range(200):
        if number == closes_after:
            queue.close()
        text = _text(number, deadline=rng.choice([0, number * 1000 + 10**6]), tenant=number % 3)
        try:
            leave(queue.offer([text]))
        except (Draining, QueueFull):
            leave([text])
    queue.close()
    assert [thread.result() for thread in threads] == [None, None]
    assert left == Counter(range(200)) and not len(queue)
