"""Readers of a live state: when they see a change, and what they go on with."""

import time

import pytest
import torch

from builder.live import Live
from hplm.engine.backbone import View, Watch
from hplm.errors import Draining, NoTenant
from tests.builder.places import make_place, served


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


def test_every_reader_is_waited_for(place):
    store, repository, state = place
    live = Live.open(repository, state)
    backbone = served(place)
    watch = Watch(backbone)
    try:
        until_somebody_reads(live)
        change = live.add_from(store, "new-a")
        assert live.settle(change.generation) == []
        assert backbone.view.snapshot.generation == change.generation
        stuck = next(live.state.readers.glob("[!.]*")).with_name("elsewhere-1-abc")
        stuck.write_text("0\n")
        monkey = pytest.MonkeyPatch()
        monkey.setattr("hplm.tenants.state.PATIENCE", 0.6)
        assert live.settle(change.generation) == ["elsewhere-1-abc"]
        monkey.undo()
    finally:
        watch.close()
    assert [file.name for file in live.state.readers.glob("[!.]*")] == ["elsewhere-1-abc"]


def test_a_reader_that_cannot_take_a_change_is_late_and_not_gone(place, monkeypatch):
    """Whoever deletes a tenant is told that it is still served there."""
    store, repository, state = place
    live = Live.open(repository, state)
    backbone = served(place)
    monkeypatch.setattr(backbone, "refresh", lambda: (_ for _ in ()).throw(TypeError("a field that is not known")))
    monkeypatch.setattr("hplm.tenants.state.ALIVE_SECONDS", 2.0)
    monkeypatch.setattr("hplm.tenants.state.PATIENCE", 4.0)
    watch = Watch(backbone)
    try:
        until_somebody_reads(live)
        change = live.add_from(store, "new-a")
        assert len(live.settle(change.generation)) == 1
    finally:
        watch.close()


def test_a_reader_that_may_not_write_sees_the_same(place, monkeypatch):
    store, repository, state = place
    monkeypatch.setattr("hplm.tenants.state.Reader.say", _read_only)
    backbone = served(place)
    watch = Watch(backbone)
    try:
        change = Live.open(repository, state).add_from(store, "new-a")
        for _ in range(100):
            if backbone.view.snapshot.generation == change.generation:
                break
            time.sleep(0.05)
        assert backbone.view.snapshot.find("new-a")
    finally:
        watch.close()


def test_a_request_that_was_admitted_before_compacting_is_answered_after_it(place):
    store, repository, state = place
    live = Live.open(repository, state)
    live.add_from(store, "new-a")
    backbone = served(place)
    live.add_from(store, "new-b")  # the bank grows after it was opened
    backbone.refresh()
    view = backbone.view
    expected = weights(served(place).view, "new-b")  # read through another opening
    live.delete("new-a")
    assert live.compact() > 0
    backbone.refresh()
    record = view.snapshot.find("new-b").adapter
    assert not live.state.bank(record.bank).exists() and backbone.view.snapshot.find("new-b").adapter != record
    for found, wanted in zip(weights(view, "new-b"), expected, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def weights(view: View, tenant: str) -> list[dict[str, torch.Tensor]]:
    record = view.snapshot.find(tenant).adapter
    return view.banks[record.bank].weights(record)


def test_a_ticket_of_a_generation_that_was_never_looked_at_is_good(place):
    """Two changes between two looks: lookup saw the first, and the upper half does not."""
    store, repository, state = place
    live, backbone = Live.open(repository, state), served(place)
    generations = [live.add_from(store, name).generation for name in ("new-a", "new-b", "new-c")]
    between = backbone.at(generations[1])
    assert {tenant.id for tenant in between.snapshot.tenants} >= {"new-a", "new-b"}
    with pytest.raises(NoTenant):
        between.snapshot.find("new-c")
    assert backbone.view.snapshot.generation == generations[2] and backbone.at(generations[1]) is between
    with pytest.raises(Draining):
        backbone.at(generations[2] + 1)


def until_somebody_reads(live):
    for _ in range(100):
        if any(live.state.readers.glob("[!.]*")):
            return
        time.sleep(0.05)
    raise AssertionError("no reader has said what it serves")


def _read_only(*_):
    raise PermissionError("read-only file system")
