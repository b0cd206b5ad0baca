"""A follower that ends at a call of its disk leaves what servers can read, and the next one goes on."""

import contextlib
import errno
import shutil

import pytest

from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from tests.follow.machine import Machine, content, same, step
from tests.follow.test_following import add_law
from tests.places import knowledge, learn, served
from tests.support.faulty_store import Cut, FaultyStore
from tests.support.wait import eventually

pytestmark = pytest.mark.slow
EVERY = 7
NEEDED = ("snapshots", "adapters", "plot")  # by the readers of a copy


def end(store, event, path):
    """The process ends here: nothing changes any more."""
    with contextlib.suppress(Cut):
        store.cut(event, path)
    raise OSError(errno.EIO, "this process has ended", path)


@pytest.fixture
def changes(place, machine):
    """Makes a copy of a first generation, then changes of each kind. Returns what each tenant may be served with."""
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    machine.follow()
    old = known(live)
    learn(store, "new-a", 2, seed=60)
    live.update("new-a", knowledge(store, "new-a"))
    live.add("new-c", knowledge(store, "new-c"))
    live.delete("tenant-1")
    add_law(place, live)
    new = known(live)
    return {name: [found[name] for found in (old, new) if name in found] for name in {**old, **new}}


def known(live):
    def contents(tenant):
        return [content(live.folder, live.state, record) for record in tenant.records()]

    return {tenant.id: contents(tenant) for tenant in live.current().tenants}


def test_an_interruption_leaves_a_generation_that_is_served(place, source, machine, changes, tmp_path):
    """Takes seconds: every seventh call of a follower is cut. Its two threads mix them anew each time."""
    store, repository, state = place
    calls, call = 0, 1 - EVERY
    while calls >= call:
        call += EVERY
        copy = shutil.copytree(machine.root, tmp_path / str(call))
        again, faulty = Machine(repository, copy, source.url), FaultyStore(copy, decides="CURRENT")
        with faulty.at(call, end), contextlib.suppress(OSError), again.following() as following:

            def done(following=following, faulty=faulty, call=call):
                step(following)
                return following.copy.is_whole or faulty.calls >= call

            eventually(done)
        calls = faulty.calls
        unsynced = [name.removeprefix(f"{copy}/toy/") for name in faulty.unsynced if not name.endswith(".writing")]
        assert not [name for name in unsynced if name.startswith(NEEDED)], "a power cut would take it"
        assert not served((store, repository, copy)).view.forest.failures()
        for tenant in again.served().tenants:  # each has its old knowledge or its new one
            assert [content(again.folder, again.state, record) for record in tenant.records()] in changes[tenant.id]
        for branch in again.served().branches:
            for file in (again.state.tables / branch.folder).glob("*"):
                assert file.read_bytes() == (State(state / "toy").tables / branch.folder / file.name).read_bytes()
        again.follow()
        assert same((repository, state), again) and not list(again.state.folder.glob("arriving/*"))
    assert calls > 30


def test_what_an_interrupted_follower_left_is_removed(place, source, machine, monkeypatch):
    store, repository, state = place
    Manager.open(repository, state).add("new-a", knowledge(store, "new-a"))
    machine.follow()
    kept = {file for file in machine.state.folder.rglob("*") if file.is_file()}
    for name in ("plot/old/1/values", "adapters/x.part0.g9.bank", "adapters/y.bank.writing", "snapshots/9.writing"):
        (machine.state.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.state.folder / name).write_bytes(b"0")
    (machine.state.folder / "arriving/old.1.5").mkdir(parents=True)
    monkeypatch.setattr("hplm.follow.copy.REST_SECONDS", 0.0)
    monkeypatch.setattr("hplm.follow.records.REST_SECONDS", 0.0)
    monkeypatch.setattr("hplm.follow.copy.SWEEPING_SECONDS", 0.0)
    with machine.following() as following:
        for _ in range(3):
            step(following)
        eventually(lambda: not list(machine.state.folder.glob("arriving/*")))
    assert {file for file in machine.state.folder.rglob("*") if file.is_file()} == kept
