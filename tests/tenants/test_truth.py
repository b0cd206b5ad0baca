"""A change of a live state that is cut, meets a full disk, or meets another change at any call: all is whole, nothing lost."""

from itertools import count

import pytest

from tests.support.faulty_store import FaultyStore
from tests.tenants.truth import Change, World

pytestmark = pytest.mark.slow


TWO = Change("add", "two", 1), Change("add key", "two"), Change("update", "two", 2), Change("limit", "two", 3)
BEFORE = (*TWO, Change("update domain"), Change("add domain"))
EACH = [
    (Change("update", "two", 3), (*BEFORE, Change("roll back", "two"))),
    *((change, BEFORE) for change in (
        Change("add", "three", 1), Change("roll back", "two"), Change("delete", "two"), Change("add key", "one"),
        Change("delete domain"), Change("roll back domain"),
    )),
    *((change, ()) for change in (Change("add domain"), Change("update domain"))),
]  # fmt: skip
FULL = EACH[1], EACH[-2]


def named(given):
    return getattr(given, "kind", getattr(given, "__name__", ""))


@pytest.mark.parametrize(
    "change, before, harm",
    [*((*given, FaultyStore.cut) for given in EACH), *((*given, FaultyStore.fail) for given in FULL)],
    ids=named,
)
def test_a_change_that_is_interrupted_at_any_call_is_complete_or_undone(export, tmp_path, change, before, harm):
    """The next change works, and removes what was left. Takes some seconds: each call of each change is cut once."""
    first = World(export, tmp_path / "first")
    for one in before:
        first.change(one)
    for call in count(1):
        world = World(export, tmp_path / str(call), like=first)
        if not world.interrupt(change, call, harm):
            break
        world.change(Change("limit", "zero", 5))
    assert call > 10


@pytest.mark.parametrize(
    "change, other",
    [(Change(kind), other) for kind in ("add domain", "update domain") for other in (Change("limit", "one", 7), Change(kind))],
    ids=named,
)
def test_a_change_that_meets_another_at_any_call_loses_neither(export, tmp_path, change, other):
    """A domain's files are copied before its change, so that other managers go on. Takes some seconds, as above."""
    first, met = World(export, tmp_path / "first"), 0
    for call in count(1):
        world = World(export, tmp_path / str(call), like=first)
        if not world.meet(change, call, other):
            break
        met += other in world.made
        world.change(Change("limit", "zero", 5))
    assert met > 10
