"""A change of a live state that is cut, or meets a full disk, at any call: readers see the old state or the new one."""

import pytest

from tests.support.faulty_store import FaultyStore
from tests.tenants.truth import Change, Export, World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return Export(tmp_path_factory.mktemp("export"))


BEFORE = (Change("add", "two", 0), Change("update", "two", 2), Change("update domain"), Change("copy domain"))
AFTER_THESE = (
    Change("add", "three", 1), Change("update", "two", 3), Change("roll back", "two"), Change("delete", "two"),
    Change("add key", "one"), Change("compact"), Change("delete domain"), Change("roll back domain"),
)  # fmt: skip
EACH = [(change, BEFORE) for change in AFTER_THESE]


FULL = [(*EACH[0], FaultyStore.fail)]


@pytest.mark.parametrize(
    "change, before, harm",
    [*((*given, FaultyStore.cut) for given in EACH), *FULL],
    ids=lambda given: getattr(given, "kind", getattr(given, "__name__", "")),
)
def test_a_change_that_is_interrupted_at_any_call_is_complete_or_undone(export, tmp_path, monkeypatch, change, before, harm):
    """The next change works, and removes what was left. Takes some seconds: each call of each change is cut once."""
    first = World(export, tmp_path / "first", monkeypatch)
    assert all(first.change(0, one) for one in before)
    calls, call = 0, 0
    while calls >= call:
        call += 1
        world = World(export, tmp_path / str(call), monkeypatch, like=first)
        world.read(0)
        world.change(0, change, call, harm)
        calls = world.store.calls
        world.read(0)
        assert world.change(1, Change("limit", "zero", 5))
        world.check_held()
        world.read(0)
    assert call > 10
