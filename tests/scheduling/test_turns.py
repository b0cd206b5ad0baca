"""The line before lookup: tenants take turns, a full line keeps small tenants' places, and every item leaves it once."""

import sys
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.scheduling.limits import Limits
from hplm.scheduling.turns import Turns
from tests.scheduling.displaced import check_displaced

PIECE = 10


@dataclass(eq=False)
class Asked:
    owner: str
    left: int = 1
    deadline_ns: int = 0


class Line(Turns[Asked]):
    """A line with a clock that a test sets."""

    def __init__(self, items=100, work=10_000):
        self.now = 0
        super().__init__(Limits(items, work), PIECE, lambda: self.now)

    def enter(self, tenant, left=1, deadline_ns=0):
        item = Asked(tenant, left, deadline_ns)
        assert self.offer(item) == []
        return item

    def work(self):
        """Does a piece of each item whose turn it is. Returns the tenants with the work that was done."""
        done = Counter()
        for item in self.take()[0]:
            done[item.owner] += (piece := min(item.left, PIECE))
            item.left -= piece
            if item.left:
                self.give_back(item)
        return done


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


def test_an_offer_to_a_full_line_looks_at_few_of_its_tenants():
    line, calls = Line(items=2000), Counter()
    for number in range(1000):
        line.enter(f"tenant {number}")
        line.enter(f"tenant {number}")
    assert len(line.offer(Asked("first"))) == 1  # this one may look at all
    sys.setprofile(lambda frame, event, called: calls.update([event]))
    try:
        for number in range(500):
            assert len(line.offer(Asked(f"new {number}"))) == 1
            assert line.offer(refused := Asked(f"new {number}", 10)) == [refused]
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 1000 * 100 and len(line) == 2000


OFFERS = st.tuples(st.just("offer"), st.sampled_from("abcd"), st.integers(1, 40), st.integers(0, 60))
STEPS = st.lists(st.one_of(OFFERS, st.just(("take",)), st.tuples(st.just("wait"), st.integers(1, 20))), max_size=80)


@settings(max_examples=300)
@given(STEPS)
def test_every_item_leaves_once_and_the_bounds_hold(steps):
    line, inside, left, waiting = Line(items=6, work=90), set(), Counter(), []
    for name, *rest in [*steps, *[("take",)] * 100]:
        if name == "wait":
            line.now += rest[0]
        elif name == "offer":
            tenant, work, allowed = rest
            item = Asked(tenant, work, line.now + allowed if allowed else 0)
            inside.add(item)
            left.update(gone := line.offer(item))
            check_displaced(waiting, item, gone, (6, 90), lambda one: (1, one.left), lambda one: one.owner)
            waiting = [one for one in [*waiting, item] if one not in gone]
        elif len(line):
            taken, expired = line.take()
            assert all(item.deadline_ns and item.deadline_ns <= line.now for item in expired)
            left.update(expired)
            waiting = [one for one in waiting if one not in expired and one not in taken]
            assert sum(min(item.left, PIECE) for item in taken) <= PIECE
            for item in taken:
                item.left -= min(item.left, PIECE)
                if item.left:
                    line.give_back(item)
                    waiting.insert(0, item)
                else:
                    left[item] += 1
        assert len(line) == len(waiting) <= 6 + 1  # an item that is given back keeps its place
    assert not len(line)
    assert left == dict.fromkeys(inside, 1)
