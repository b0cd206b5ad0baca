"""The line does what lists would do: limits, order, expiry, halves, who runs alone. Each text leaves once."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import DeadlineMissed, Draining, QueueFull
from hplm.scheduling.columns import NEVER
from hplm.scheduling.cost import FIRST
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import OURS, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import SimulatedText
from tests.scheduling.displaced import check_displaced
from tests.support.message import mentions

MS = 1_000_000
ROOM = Capacity(tokens=100, texts=8, tenants=2, in_flight=3)
LIMITS = Limits(items=10, work=1000)
FAR = 1 << 62
ORDERS = {  # of the simple policies, and whether a batch ends at the first text that does not fit
    "fcfs": (lambda text: 0, True),
    "sjf": (lambda text: text.tokens, False),
    "edf": (lambda text: text.deadline_ns or FAR, False),
}


def filled(waiting, order, stops):
    """Returns the batch of a policy that sorts texts and fills a batch. A tenant's places go to its own texts by priority."""
    batch, ordered = [], sorted(waiting, key=order)
    own = {text.tenant: iter(sorted([one for one in ordered if one.tenant == text.tenant], key=lambda one: -one.priority))
           for text in ordered}  # fmt: skip
    for text in [next(own[text.tenant]) for text in ordered]:
        more = [*batch, text]
        fits = sum(one.tokens for one in more) <= ROOM.tokens and len(more) <= ROOM.texts
        if not batch or (fits and len({one.slot_key for one in more}) <= ROOM.tenants):
            batch = more
        elif stops:
            break
    return batch


class Line:
    """A scheduler, and the lists that it must be like."""

    def __init__(self, name, admission, alone=frozenset()):
        self.scheduler = Scheduler(policy(name), LIMITS, admission)
        self.order, self.admission = ORDERS.get(name) if not alone else None, admission
        self.scheduler.alone = alone
        self.now, self.offered = 1, 0
        self.waiting: list[list[SimulatedText]] = []  # by request
        self.running, self.halves = deque(), deque()
        self.left = Counter()
        self.closed = False

    def leave(self, texts):
        self.left.update(text.number for text in texts)

    def take_out(self, texts):
        self.waiting = [rest for request in self.waiting if (rest := [text for text in request if text not in texts])]

    def offer(self, tenant, sizes, size, allowed_ms, priority):
        common = {"arrival_ns": self.now, "priority": priority, "tenant": tenant, "slot_key": tenant, "bytes": size}
        common["deadline_ns"] = allowed_ms and self.now + allowed_ms * MS
        texts = [SimulatedText(tokens=tokens, number=number, **common) for number, tokens in enumerate(sizes, self.offered)]
        self.offered += len(texts)
        try:
            displaced = self.scheduler.offer(texts, self.now)
        except (DeadlineMissed, Draining, QueueFull) as error:
            assert isinstance(error, Draining) == self.closed
            assert not isinstance(error, DeadlineMissed) or (self.admission and allowed_ms)
            if isinstance(error, QueueFull):
                self.check_displaced(texts, [texts])
                assert mentions(str(error), "retry after 0.1 s")
            self.leave(texts)
            return
        assert not self.closed
        gone = [request for request in self.waiting if request[0] in displaced]
        assert Counter(text for request in gone for text in request) == Counter(displaced), "not whole requests leave"
        self.check_displaced(texts, gone)
        self.leave(displaced)
        self.take_out(displaced)
        self.waiting.append(texts)

    def check_displaced(self, texts, gone):
        def size(request):
            return len(request), sum(text.bytes for text in request)

        check_displaced(self.waiting, texts, gone, (LIMITS.items, LIMITS.work), size, lambda request: request[0].tenant)

    def expire(self):
        told = self.scheduler.expired(self.now)
        late = [request for request in self.waiting if any(0 < text.deadline_ns <= self.now for text in request)]
        gone = [text for request in late for text in request]
        early = [text for text in told if text not in gone]
        requests = [request for request in self.waiting if request[0] in early]
        assert self.admission or not early
        assert sorted(text.number for request in requests for text in request) == sorted(text.number for text in early)
        assert all(any(text.deadline_ns for text in request) for request in requests)
        self.take_out(gone + early)
        assert Counter(told) == Counter(gone + early), "expired texts are not told once"
        self.leave(told)
        deadlines = [text.deadline_ns for request in self.waiting for text in request if text.deadline_ns]
        expiry = self.scheduler.next_expiry(self.now)
        assert expiry <= min(deadlines, default=expiry) and (self.admission or expiry == min(deadlines, default=expiry))

    def choose(self):
        self.expire()
        batch = self.scheduler.choose(ROOM, self.now)
        if len(self.running) >= ROOM.in_flight or {own.texts[0].tenant for own in self.running} & self.scheduler.alone:
            assert batch is None, "too many batches are in flight, or a tenant that runs alone has company"
            return
        in_flight = {text.tenant for own in (*self.running, *[batch] * (batch is not None)) for text in own.texts}
        assert len(in_flight) < 2 or not in_flight & self.scheduler.alone, "a tenant that runs alone has company"
        if self.halves:
            assert batch.texts == self.halves.popleft(), "not the halves of a batch came first"
        else:
            waiting = [text for request in self.waiting for text in request]
            if batch is None:
                assert self.running or all(text.deadline_ns for text in waiting), "nothing is chosen, and texts wait"
                assert not waiting or not self.order
                return
            chosen = batch.texts
            assert all(text in waiting for text in chosen) and len(set(chosen)) == len(chosen)
            if len(chosen) > 1:
                assert sum(text.tokens for text in chosen) <= ROOM.tokens and len(chosen) <= ROOM.texts
                assert len({text.slot_key for text in chosen}) <= ROOM.tenants
            if self.order:
                assert chosen == filled(waiting, *self.order), "not in the order of the policy"
            self.take_out(chosen)
        self.scheduler.started(batch, self.now)
        self.running.append(batch)

    def end(self, how):
        """`how`: it is computed or dropped, or halved because it had no memory."""
        if not self.running:
            return
        batch = self.running.popleft()
        texts = batch.texts
        if how == "drop":
            self.scheduler.dropped(batch)
        elif how == "halve" and self.scheduler.halve(batch, left := texts[-4:], self.now):  # the first may have left it
            assert len(texts) > 1 and not batch.is_half
            self.halves += [left[: len(left) // 2], left[len(left) // 2 :]] if len(left) > 1 else [left]
            self.leave(texts[:-4])
            return
        else:
            assert how != "halve" or len(texts) == 1 or batch.is_half
            self.now += MS
            self.scheduler.finished(batch, self.now)
        self.leave(texts)

    def wait(self, ms):
        self.now += ms * MS

    def close(self):
        self.scheduler.close()
        self.closed = True

    def abandon(self):
        texts = [text for batch in self.running for text in batch.texts]
        texts += [text for some in (*self.halves, *self.waiting) for text in some]
        assert Counter(self.scheduler.abandon()) == Counter(texts), "what is given up is not what has no answer"
        self.leave(texts)
        for batch in self.running:
            self.scheduler.finished(batch, self.now + MS)
        assert self.scheduler.choose(ROOM, self.now) is None and not self.scheduler.expired(self.now)

    def serve(self):
        for _ in range(10 * self.offered + 10):
            if not len(self.scheduler) and not self.running:
                break
            self.choose()
            self.end("compute")
            self.wait(10)
            self.expire()
        assert not self.waiting and not self.running, "texts wait for ever"


OFFER = st.tuples(
    st.just("offer"), st.integers(0, 5), st.lists(st.sampled_from([1, 5, 20, 60, 120]), min_size=1, max_size=4),
    st.sampled_from([1, 1, 100, 240]), st.sampled_from([0, 0, 2, 20, 100]), st.sampled_from([0, 0, 0, 1, -(2**31), 2**31 - 1]),
)  # fmt: skip
END = st.tuples(st.just("end"), st.sampled_from(["compute", "compute", "drop", "halve"]))
WAIT = st.tuples(st.just("wait"), st.integers(1, 20))
STEPS = st.lists(
    st.one_of(OFFER, OFFER, OFFER, st.just(("choose",)), END, WAIT, st.just(("expire",))), min_size=25, max_size=60
)


@pytest.mark.parametrize("name", [*OURS, "das:rows=3"])
@settings(max_examples=60)
@given(
    steps=STEPS, admission=st.booleans(), closes_after=st.sampled_from([10, 20, 30, 99, 99]), is_given_up=st.booleans(),
    alone=st.just(frozenset()) | st.frozensets(st.integers(0, 5)),
)  # fmt: skip
def test_the_line_is_like_lists_of_requests(name, steps, admission, closes_after, is_given_up, alone):
    line = Line(name, admission, alone)
    for number, (step, *given_with) in enumerate(steps):
        if number == closes_after:
            line.close()
        getattr(line, step)(*given_with)
        assert len(line.scheduler) == sum(map(len, (*line.waiting, *line.halves)))
        assert line.scheduler.shares.work == sum(text.bytes for request in line.waiting for text in request)
    line.abandon() if is_given_up else line.serve()
    assert line.left == Counter(range(line.offered)) and not len(line.scheduler) and not line.scheduler.shares.work


def test_a_request_that_is_refused_for_its_deadline_leaves_the_largest_tenant_the_largest():
    line = Line("fcfs", admission=True)
    for _ in range(FIRST):
        line.offer(0, [5], 1, 0, 0)
        line.choose()
        line.end("compute")
    for tenant in (2,) * 7 + (4,) * 3:
        line.offer(tenant, [5], 1, 0, 0)
    waiting = line.waiting[:]
    line.offer(6, [5] * 3, 1, 1, 0)
    assert line.waiting == waiting, "it is in time, and shows nothing"
    line.offer(6, [5], 1, 0, 0)  # displaces a text of tenant 2


def test_the_oldest_waiting_text_is_known_also_when_its_batch_was_halved():
    scheduler = Scheduler(policy("fcfs"), LIMITS)
    scheduler.offer([SimulatedText(tokens=10, arrival_ns=3) for _ in range(2)], 3)
    batch = scheduler.choose(ROOM, 4)
    assert scheduler.waiting() == (0, 0, NEVER)
    scheduler.offer([SimulatedText(tokens=10, arrival_ns=7, bytes=5)], 7)
    assert scheduler.waiting() == (1, 5, 7)
    assert scheduler.halve(batch, batch.texts, 10) and scheduler.waiting() == (3, 5, 3)
