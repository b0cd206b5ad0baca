import threading

import pytest

from hplm.errors import Draining, QueueFull
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import SimulatedText
from hplm.scheduling.waiting import Capacity
from tests.support.message import mentioning

ROOM = Capacity(tokens=100, texts=10, tenants=3)


class Clock:
    def __init__(self):
        self.now = 1

    def __call__(self):
        return self.now


def _text(tokens=10, deadline=0, size=1):
    return SimulatedText(tokens=tokens, bytes=size, arrival_ns=0, deadline_ns=deadline)


def _queue(limit=100, size=1000):
    clock = Clock()
    return Queue(Scheduler(policy("fcfs"), Limits(limit, size)), clock), clock


def _in_a_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_a_request_is_queued_completely_or_not_at_all():
    queue, _ = _queue(limit=3)
    queue.offer([_text(), _text()])
    with pytest.raises(QueueFull, match=mentioning(2, 3, "retry after 0.1 s")):
        queue.offer([_text(), _text()])
    queue.offer([_text()])
    assert len(queue) == 3


def test_the_queue_has_a_limit_of_bytes():
    queue, _ = _queue(size=10)
    queue.offer([_text(size=6)])
    with pytest.raises(QueueFull, match=mentioning(6, 5, 10, "retry after 0.1 s")):
        queue.offer([_text(size=2), _text(size=3)])
    assert queue.take(ROOM)
    queue.offer([_text(size=10)])


def test_taking_waits_for_a_text():
    queue, _ = _queue()
    taker, batches = _in_a_thread(lambda: queue.take(ROOM))
    text = _text()
    queue.offer([text])
    taker.join(10)
    assert batches[0].texts == [text]


def test_expired_texts_are_returned_even_if_no_batch_is_taken():
    queue, clock = _queue()
    waiter, expired = _in_a_thread(queue.expired)
    queue.offer([_text()])
    late = _text(deadline=5)
    clock.now = 5
    queue.offer([late])
    waiter.join(10)
    assert expired == [[late]]


def test_a_closed_queue_serves_waiting_texts_and_refuses_new_ones():
    queue, _ = _queue()
    queue.offer([_text()])
    waiter, expired = _in_a_thread(queue.expired)
    queue.close()
    with pytest.raises(Draining):
        queue.offer([_text()])
    assert len(queue.take(ROOM).texts) == 1
    assert queue.take(ROOM) is None
    waiter.join(10)
    assert expired == [None]
