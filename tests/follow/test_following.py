"""A copy that follows its source through changes of tenants and tables. The source is the real nginx."""

import random
import shutil
from contextlib import closing
from functools import partial

import pytest
import torch

from builder.store.store import TenantFile
from hplm.errors import NoTenant
from hplm.follow.follower import Follower
from hplm.follow.records import Records
from hplm.follow.source import Source
from hplm.tenants.manager import Manager
from testing.random_store import random_table, random_tenant
from tests.follow.machine import Machine, same, step, until_whole
from tests.follow.nginx import TOKEN, nginx
from tests.places import answer, knowledge, learn, make_place, served

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


@pytest.fixture
def url(place, tmp_path):
    place[2].mkdir()
    with nginx(place[2], tmp_path / "nginx") as url:
        yield url


@pytest.fixture
def machine(place, tmp_path, url):
    return Machine(place[1], tmp_path / "copy", url, TOKEN)


def add_law(place, live, tenants=("lawyer",)):
    store = place[0]
    random_table(store, "law", 1, ("root", 1), 2000, seed=3)
    for number, name in enumerate(tenants):
        random_tenant(store, TenantFile(name, 1, "law", 1, "classify", ["x", "y"], 4), 0.3, seed=60 + number)
    live.adopt_domain("law", 1, store.table_folder("law", 1))
    for name in tenants:
        live.add(name, knowledge(store, name))


def test_a_copy_exists_when_its_source_has_a_state(place, machine):
    live = Manager.open(*place[1:])
    with machine.following() as following:
        step(following)
        assert not machine.state.current_file.exists()
        live.state.begin()
        until_whole(following)
        assert machine.state.current_file.exists() and machine.state.current() == 0
    live.compact()  # a generation that says what the export says
    another = Machine(place[1], machine.root.with_name("another"), machine.url, TOKEN)
    another.state.begin()  # by a server that was started before its follower
    another.follow()
    assert another.state.followed.exists() and another.state.current_file.exists()


@pytest.mark.parametrize("must_exist", [False, True])
def test_the_first_copy_may_wait_for_a_state(place, machine, must_exist):
    live = Manager.open(*place[1:])

    class Stop:
        def is_set(self):
            return False

        def wait(self, seconds):
            live.state.begin()

    connect = partial(Source, machine.url, machine.token)
    with closing(Follower(place[1], machine.root, connect, machine.name, machine.said.append)) as follower:
        follower.run(Stop(), once=True, must_exist=must_exist)
    assert live.state.current_file.exists() == machine.state.current_file.exists() == must_exist


def test_a_copy_answers_as_its_source_after_every_kind_of_change(place, machine):
    store, repository, state = place
    live = Manager.open(repository, state)
    source = repository, state
    with machine.following() as following:
        step(following)
        assert following.copy.is_whole and not machine.state.current_file.exists()
        for name in ("new-a", "new-b", "new-c"):
            live.add(name, knowledge(store, name))
        until_whole(following)
        assert same(source, machine) and torch.equal(machine.answer("new-c"), answer(place, "new-c"))
        learn(store, "new-a", 2, seed=60)
        live.update("new-a", knowledge(store, "new-a"))
        until_whole(following)
        assert same(source, machine) and machine.served().find("new-a").version == 2
        live.roll_back("new-a")
        until_whole(following)
        assert same(source, machine) and machine.served().find("new-a").version == 1
        _, key = live.add_key("new-b")
        _, second = live.add_key("new-b")
        live.revoke_key("new-b", key.id)
        live.limit("tenant-0", rate=5.0)
        until_whole(following)
        assert same(source, machine) and machine.served().find("new-b").keys == (second,)
        add_law(place, live)
        until_whole(following)
        assert same(source, machine) and torch.equal(machine.answer("lawyer"), answer(place, "lawyer"))
        live.delete("new-b")
        assert live.compact() > 0
        before = machine.served().find("new-c").records()
        until_whole(following)
        assert same(source, machine) and machine.served().find("new-c").records() == before
        live.delete("lawyer")
        live.delete_domain("law")
        until_whole(following)
        assert same(source, machine) and (machine.state.tables / "law/1").exists(), "readers may still open it"


def test_a_server_reads_a_copy_as_it_reads_a_state(place, machine):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    machine.follow()
    backbone = served((store, repository, machine.root))
    live.delete("new-a")
    live.add("new-b", knowledge(store, "new-b"))
    machine.follow()
    backbone.refresh()
    assert backbone.view.snapshot.find("new-b")
    with pytest.raises(NoTenant):
        backbone.view.snapshot.find("new-a")


def test_records_that_are_here_are_not_brought_again(place, machine, monkeypatch):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    machine.follow()
    brought, bring = [], Records.bring
    monkeypatch.setattr(Records, "bring", lambda self, *given: brought.append(given) or bring(self, *given))
    live.limit("new-a", rate=5.0)
    live.compact()
    machine.follow()
    assert same((repository, state), machine) and not brought


def test_many_generations_are_skipped(place, machine):
    store, repository, state = place
    live = Manager.open(repository, state)
    with machine.following() as following:
        step(following)
        for number in range(40):
            live.limit("tenant-0", rate=float(number + 1))
        live.add("new-a", knowledge(store, "new-a"))
        until_whole(following)
        assert same((repository, state), machine) and machine.state.current() < 5


def test_a_table_of_the_same_name_after_a_deletion_is_another_one(place, machine):
    store, repository, state = place
    live = Manager.open(repository, state)
    add_law(place, live)
    machine.follow()
    old = machine.answer("lawyer")
    live.delete("lawyer")
    live.delete_domain("law")
    shutil.rmtree(store.table_folder("law", 1))
    random_table(store, "law", 1, ("root", 1), 3000, seed=4)
    live.adopt_domain("law", 1, store.table_folder("law", 1))
    live.add("lawyer", knowledge(store, "lawyer"))
    machine.follow()
    assert same((repository, state), machine)
    assert torch.equal(machine.answer("lawyer"), answer(place, "lawyer")) and not torch.equal(machine.answer("lawyer"), old)


@pytest.mark.parametrize("seed", [1, 2])
def test_after_any_changes_two_copies_are_as_their_source(place, machine, tmp_path, seed):
    """One looks after every change, the other one now and then."""
    store, repository, state = place
    rng, live = random.Random(seed), Manager.open(repository, state)
    other = Machine(repository, tmp_path / "other", machine.url, TOKEN, "two")
    random_table(store, "law", 1, ("root", 1), 2000, seed=3)
    versions = dict.fromkeys(("new-a", "new-b", "new-c", "tenant-0"), 1)
    with machine.following() as near, other.following() as far:
        for number in range(25):
            changed = change(rng, live, store, versions, number)
            step(near)
            if changed and rng.random() < 0.3:
                step(far)
        until_whole(near)
        until_whole(far)
        assert same((repository, state), machine) and same((repository, state), other)


def change(rng, live, store, versions, number):
    """Makes a random change, if it is possible now."""
    tenants = {tenant.id: tenant for tenant in live.current().tenants}
    name = rng.choice(sorted(versions))
    domains = {branch.domain for branch in live.current().branches}
    action = rng.choice(["put", "put", "back", "delete", "limit", "key", "compact", "domain"])
    if action == "put" and name not in tenants:
        live.add(name, knowledge(store, name))
    elif action == "put":
        versions[name] += 1
        learn(store, name, versions[name], seed=100 + number)
        live.update(name, knowledge(store, name))
    elif action == "delete" and name in tenants:
        live.delete(name)
    elif action == "limit" and name in tenants:
        live.limit(name, rate=rng.random() * 10)
    elif action == "key" and name in tenants:
        if len(tenants[name].keys) > 1:
            live.revoke_key(name, tenants[name].keys[0].id)
        else:
            live.add_key(name)
    elif action == "compact":
        live.compact()
    elif action == "domain" and "law" in domains:
        live.delete_domain("law")
    elif action == "domain":
        live.adopt_domain("law", 1, store.table_folder("law", 1))
    else:
        return False
    return True
