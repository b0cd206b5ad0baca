"""The line before lookup: tenants take turns, a full line keeps small tenants' places, and every piece leaves it once."""

import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns
from tests.scheduling.displaced import check_displaced

PIECE = 10


@dataclass(eq=False)
class Asked:
    owner: str
    work: int = 1
    deadline_ns: int = 0

    @property
    def pieces(self):
        return [min(PIECE, self.work - done) for done in range(0, self.work, PIECE)]


class Line(Turns[Asked]):
    """A line with a clock that a test sets."""

    def __init__(self, items=100, work=10_000):
        self.now = 0
        super().__init__(Limits(items, work), PIECE, lambda: self.now)

    def enter(self, tenant, work=1, deadline_ns=0):
        item = Asked(tenant, work, deadline_ns)
        assert self.enqueue_item(item, *item.pieces) == []
        return item

    def work(self):
        """Returns the tenants whose turn it is, with the work that waits no longer."""
        before = self.held()
        self.take()
        return before - self.held()

    def held(self):
        return Counter({tenant: work for tenant, (_, work) in self.shares._held.items()})


def test_tenants_get_equal_work_from_when_they_come_whatever_the_size_of_their_requests():
    line = Line()
    for _ in range(50):
        line.enter("small", 5)
    for _ in range(10):
        line.work()
    for _ in range(4):
        line.enter("large", 25)
    done = Counter()
    while done.total() < 180:
        done += line.work()
        assert abs(done["small"] - done["large"]) <= 2 * PIECE, f"of all work that was done the tenants have {dict(done)}"


def test_what_gets_no_turn_costs_its_tenant_no_later_one():
    line = Line(items=20)
    for _ in range(40):
        line.enqueue_item(Asked("noisy", 5), 5)
    for number in range(10):
        assert len(line.enqueue_item(Asked(f"other {number}", 5), 5)) == 1  # of the noisy one
    late = [item for _ in range(3) if line.enqueue_item(item := Asked("late", 5, deadline_ns=1), 5)]
    line.now = 1
    assert line.expired() == late and line.held()["noisy"] == 35
    while line.held()["noisy"] > 10:
        line.take()
    for _ in range(8):
        line.enter("steady", 5)
    while line.held()["noisy"]:
        line.take()
    noisy, late = line.enter("noisy", 5), line.enter("late", 5)
    assert {noisy, late} < {*line.take()[0], *line.take()[0]}


def test_nobody_is_behind_who_comes_to_an_empty_line():
    line = Line()
    line.enqueue_item(Asked("large", 500), 500)
    assert line.take()
    steady = [line.enter("steady", 10) for _ in range(3)]
    large = line.enter("large", 10)
    assert line.take()[0] + line.take()[0] == [steady[0], large]


@pytest.mark.parametrize("tenants", [1, 1000])
def test_an_offer_to_a_full_line_looks_at_few_tenants_and_few_entries(tenants):
    line, calls = Line(items=2000), Counter()
    for number in range(2000):
        line.enter(f"tenant {number % tenants}")
    assert len(line.enqueue_item(Asked("first"), 1)) == 1  # this one may look at all
    sys.setprofile(lambda frame, event, called: calls.update([event]))
    try:
        for number in range(500):
            assert len(line.enqueue_item(new := Asked(f"new {number}"), 1)) == 1
            assert tenants == 1 or line.enqueue_item(new, 10) == [new]
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 1000 * 300 and len(line) == 2000


def size_of(waiting, item):
    pieces = waiting.get(item, item.pieces)
    return len(pieces), sum(pieces)


OFFERS = st.tuples(st.just("offer"), st.sampled_from("abcd"), st.integers(1, 40), st.integers(0, 60))
STEPS = st.lists(st.one_of(OFFERS, st.just(("take",)), st.tuples(st.just("wait"), st.integers(1, 20))), max_size=80)


@settings(max_examples=300)
@given(STEPS)
def test_every_piece_leaves_once_in_its_items_order_and_the_bounds_hold(steps):
    line, waiting = Line(items=6, work=90), {}  # items, oldest first, with their pieces
    for name, *rest in [*steps, *[("take",)] * 100]:
        if name == "wait":
            line.now += rest[0]
        elif name == "offer":
            tenant, work, allowed = rest
            item = Asked(tenant, work, line.now + allowed if allowed else 0)
            gone = line.enqueue_item(item, *item.pieces)
            check_displaced([*waiting], item, gone, (6, 90), partial(size_of, waiting), lambda one: one.owner)
            waiting = {one: left for one, left in [*waiting.items(), (item, item.pieces)] if one not in gone}
        elif len(line):
            taken, expired = line.take()
            assert expired == [one for one in waiting if one.deadline_ns and one.deadline_ns <= line.now]
            waiting = {one: left for one, left in waiting.items() if one not in expired}
            assert taken or not waiting
            assert sum(waiting[item].pop(0) for item in taken) <= PIECE
            waiting = {one: left for one, left in waiting.items() if left}
        assert len(line) == sum(map(len, waiting.values())) <= 6
    assert not len(line) and not waiting


@pytest.mark.parametrize("tenants", [1, 2, 7, 40])
def test_tenants_share_places_and_one_stays_free_for_a_newcomer(tenants):
    line = Turns[Asked](Limits(1000, 1000), 1, lambda: 0, places=32)
    for tenant in range(tenants):
        for _ in range(20):
            line.enqueue_item(Asked(str(tenant)), 1)
    taken = []
    while line._may_take() and len(taken) < 32:
        taken += line.take()[0]
    held = Counter(item.owner for item in taken)
    assert len(taken) < 32 or (tenants >= 32 and max(held.values()) == 1)
    assert not held or (max(held.values()) - min(held.values()) <= 1 and len(held) == min(tenants, 32))
    if len(taken) < 32:
        line.enqueue_item(new := Asked("new"), 1)
        assert line.take()[0] == [new]
        line.done(new)
    for item in taken:
        line.done(item)
    assert line._may_take() and not line._taken
