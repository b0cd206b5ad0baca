"""The places of a copy's records: none is overwritten while a reader may still read it."""

from functools import partial

import pytest
import torch

from hplm.adapters.bank import Bank
from hplm.follow.records import Records
from hplm.tenants.manager import Manager
from hplm.tenants.state import REST_SECONDS
from tests.follow.machine import content, same, step, until_whole
from tests.places import answer, knowledge, learn, served

pytestmark = pytest.mark.slow


@pytest.fixture
def clock(monkeypatch):
    """The copy's clock, which stands still until the test moves it."""

    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("hplm.follow.copy.Records", partial(Records, clock=clock))
    return clock


def sweep(following):
    following.copy._swept = -1e9
    step(following)


def test_places_that_the_source_reuses_after_a_partition_are_not_overwritten_here(place, source, machine, monkeypatch):
    """While the source was away, it gave the places of tenants that are served here to others."""
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    live.add("new-b", knowledge(store, "new-b"))
    machine.follow()
    backbone = served((store, repository, machine.root))
    view, old = backbone.view, machine.served().find("new-a").adapter
    before = content(machine.folder, machine.state, old)
    there = live.current().find("new-a").adapter
    live.delete("new-a")
    with monkeypatch.context() as later:
        later.setattr("hplm.tenants.registry.time.time", lambda: 10.0**10)
        learn(store, "new-b", 2, seed=60)
        live.update("new-b", knowledge(store, "new-b"))
    now = live.current().find("new-b").adapter
    assert (now.bank, now.index) == (there.bank, there.index), "the source has reused the place"
    machine.follow()
    assert same((repository, state), machine)
    assert content(machine.folder, machine.state, old) == before
    weights = view.banks[old.bank].weights(old)  # of a request that began before
    assert weights and torch.equal(machine.answer("new-b"), answer(place, "new-b"))


def test_a_place_is_free_after_a_minute(place, source, machine, clock):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    with machine.following() as following:
        until_whole(following)
        sweep(following)
        first = machine.served().find("new-a").adapter
        learn(store, "new-a", 2, seed=60)
        live.update("new-a", knowledge(store, "new-a"))
        until_whole(following)
        sweep(following)
        second = machine.served().find("new-a").adapter
        assert second.bank == first.bank and second.index != first.index
        clock.now += REST_SECONDS - 1
        sweep(following)
        live.add("new-b", knowledge(store, "new-b"))
        until_whole(following)
        assert machine.served().find("new-b").adapter.index not in (first.index, second.index)
        clock.now += 2
        sweep(following)
        learn(store, "new-b", 2, seed=61)
        live.update("new-b", knowledge(store, "new-b"))
        until_whole(following)
        assert machine.served().find("new-b").adapter.index == first.index
        assert same((repository, state), machine)


def test_after_a_restart_all_places_rest(place, source, machine, clock):
    """The new follower does not know which generations readers still have."""
    store, repository, state = place
    live = Manager.open(repository, state)
    for name in ("new-a", "new-b"):
        live.add(name, knowledge(store, name))
    machine.follow()
    deleted = machine.served().find("new-a").adapter
    live.delete("new-a")
    machine.follow()
    live.add("new-a", knowledge(store, "new-a"))
    with machine.following() as following:
        until_whole(following)
        assert machine.served().find("new-a").adapter.index not in (0, 1)
        assert Bank(machine.state.bank(deleted.bank)).owner(deleted.index) == (deleted.uid, deleted.version)
        clock.now += REST_SECONDS + 1
        sweep(following)
        learn(store, "new-b", 2, seed=60)
        live.update("new-b", knowledge(store, "new-b"))
        until_whole(following)
        assert machine.served().find("new-b").adapter.index == deleted.index
        assert same((repository, state), machine)
