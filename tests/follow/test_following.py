"""A copy that follows its source through changes of tenants and tables."""

import random
import shutil
from contextlib import closing, suppress
from functools import partial

import pytest
import torch

from builder.store.store import TenantFile
from hplm.errors import InvalidInput
from hplm.follow.follower import Follower
from hplm.follow.source import Source
from hplm.tenants.manager import Manager
from testing.random_store import random_table, random_tenant
from tests.follow.machine import Machine, same, step, until_whole
from tests.places import answer, knowledge, learn

pytestmark = pytest.mark.slow


def add_law(place, live, tenants=("lawyer",)):
    store = place[0]
    random_table(store, "law", 1, ("root", 1), 2000, seed=3)
    for number, name in enumerate(tenants):
        random_tenant(store, TenantFile(name, 1, "law", 1, "classify", ["x", "y"], 4), 0.3, seed=60 + number)
    live.adopt_domain("law", 1, store.table_folder("law", 1))
    for name in tenants:
        live.add(name, knowledge(store, name))


def test_a_copy_exists_when_its_source_has_a_state(place, source, machine):
    live = Manager.open(*place[1:])
    with machine.following() as following:
        step(following)
        assert not machine.state.current_file.exists()
        live.state.begin()
        until_whole(following)
        assert machine.state.current_file.exists() and machine.state.current() == 0
    live.compact()  # a generation that says what the export says
    another = Machine(place[1], machine.root.with_name("another"), machine.url)
    another.state.begin()  # by a server that was started before its follower
    another.follow()
    assert another.state.followed.exists() and another.state.current_file.exists()


@pytest.mark.parametrize("must_exist", [False, True])
def test_the_first_copy_may_wait_for_a_state(place, source, machine, must_exist):
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


def test_a_table_of_the_same_name_after_a_deletion_is_another_one(place, source, machine):
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
def test_after_any_changes_two_copies_are_as_their_source(place, source, machine, tmp_path, seed):
    """One looks after every change, the other one now and then, and skips generations."""
    store, repository, state = place
    rng, live = random.Random(seed), Manager.open(repository, state)
    other = Machine(repository, tmp_path / "other", machine.url, name="two")
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
        assert other.state.current() < machine.state.current()
    for tenant in live.current().tenants:
        assert torch.equal(machine.answer(tenant.id), answer(place, tenant.id))


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
    elif action == "back" and name in tenants:
        with suppress(InvalidInput):  # there is no version before
            live.roll_back(name)
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
