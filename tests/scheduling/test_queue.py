import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import Draining, InvalidInput, QueueFull
from hplm.scheduling.policy import FirstComeFirstServed, policy
from hplm.scheduling.queue import Queue
from hplm.scheduling.waiting import Capacity, Waiting

ROOM = Capacity(tokens=100, texts=10, tenants=3)


class Clock:
    def __init__(self):
        self.now = 1

    def __call__(self):
        return self.now


def _text(tokens=10, deadline=0, priority=0, tenant="t", arrival=0):
    return Waiting(tokens, arrival, deadline, priority, tenant, None)


def _queue(limit=100):
    clock = Clock()
    return Queue(limit, FirstComeFirstServed(), clock), clock


texts = st.builds(
    _text, tokens=st.integers(1, 120), priority=st.sampled_from([0, 0, 1, -3]), tenant=st.sampled_from("abcde")
)


@given(waiting=st.lists(texts, max_size=40), name=st.sampled_from(["fcfs"]))
def test_any_policy_serves_everything_once_and_within_capacity(waiting, name):
    chooses, left = policy(name), list(waiting)
    while left:
        batch = chooses.select(left, 0, ROOM)
        assert batch and len(batch) == len(set(map(id, batch))) and all(any(t is w for w in left) for t in batch)
        if len(batch) > 1:
            assert sum(t.tokens for t in batch) <= ROOM.tokens and len(batch) <= ROOM.texts
            assert len({t.knowledge for t in batch}) <= ROOM.tenants
        left = [text for text in left if not any(text is t for t in batch)]


@given(waiting=st.lists(texts, min_size=1, max_size=40))
def test_first_come_first_served_overtakes_nobody_of_equal_priority(waiting):
    served, left = [], list(waiting)
    while left:
        batch = FirstComeFirstServed().select(left, 0, ROOM)
        served += batch
        left = [text for text in left if not any(text is t for t in batch)]
    expected = sorted(waiting, key=lambda text: -text.priority)
    assert [id(text) for text in served] == [id(text) for text in expected]


def test_an_unknown_policy_is_named():
    with pytest.raises(InvalidInput, match="'lifo'"):
        policy("lifo")


def test_a_request_enters_whole_or_not_at_all():
    queue, _ = _queue(limit=3)
    queue.offer([_text(), _text()])
    with pytest.raises(QueueFull, match="2 texts are waiting and 2 more"):
        queue.offer([_text(), _text()])
    queue.offer([_text()])
    assert len(queue) == 3


def test_what_has_expired_comes_out_as_expired():
    queue, clock = _queue()
    late, timeless, later = _text(deadline=5), _text(), _text(deadline=50)
    queue.offer([late, timeless, later])
    clock.now = 5
    turn = queue.take(ROOM)
    assert turn.expired == [late] and turn.batch == [timeless, later]


def test_taking_waits_for_something_to_come():
    queue, _ = _queue()
    turns = []
    taker = threading.Thread(target=lambda: turns.append(queue.take(ROOM)))
    taker.start()
    text = _text()
    queue.offer([text])
    taker.join(10)
    assert turns[0].batch == [text]


def test_a_closed_queue_serves_what_it_holds_and_takes_nothing_more():
    queue, _ = _queue()
    queue.offer([_text()])
    queue.close()
    with pytest.raises(Draining):
        queue.offer([_text()])
    assert len(queue.take(ROOM).batch) == 1
    assert queue.take(ROOM) is None


def test_abandoning_hands_over_what_still_waits():
    queue, _ = _queue()
    texts = [_text(), _text()]
    queue.offer(texts)
    assert queue.abandon() == texts
    assert queue.take(ROOM) is None
