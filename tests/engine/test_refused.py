"""Requests that are refused later than they come: each is told once, in the order of the times by which it must be."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from hplm.engine.refused import Refused
from hplm.scheduling.limits import Limits


class Kept:
    def __init__(self, items=100, work=1000):
        self.now, self.told = 0, []
        self.refused = Refused(Limits(items, work), lambda request: self.told.append(request.name), lambda: self.now)

    def keep(self, name, until, left=1):
        self.refused.keep(SimpleNamespace(name=name, left=left), until)


def test_one_is_told_for_each_that_is_served():
    kept = Kept()
    for name, until in (("b", 7), ("a", 5), ("c", 9)):
        kept.keep(name, until)
    kept.refused.send_due(0)
    assert kept.told == []
    kept.refused.send_due(1)
    assert kept.told == ["a"]
    kept.refused.send_all()
    assert kept.told == ["a", "b", "c"]


def test_what_would_take_too_much_memory_is_told_at_once():
    kept = Kept(items=2, work=10)
    for name, until in (("a", 5), ("b", 6), ("c", 7)):
        kept.keep(name, until)
    assert kept.told == ["a"]
    kept.keep("huge", 8, left=11)
    assert kept.told == ["a", "b", "c", "huge"]
    kept.keep("d", 9, left=10)
    assert kept.told == ["a", "b", "c", "huge"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 3)), max_size=40),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_each_is_told_exactly_once(steps, items, work):
    kept = Kept(items, work)
    for number, (until, left, served) in enumerate(steps):
        kept.now = number // 4
        kept.keep(number, until, left)
        kept.refused.send_due(served)
        assert len(kept.told) >= number + 1 - items
    kept.refused.send_all()
    assert sorted(kept.told) == list(range(len(steps)))
