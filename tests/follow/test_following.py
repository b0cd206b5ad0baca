import pytest
from builder.store.store import TenantFile
from hplm.tenants.manager import Manager
from testing.random_store import random_table, random_tenant
from tests.follow.faulty import faulty
from tests.follow.machine import Machine, same, step, until_whole
from tests.places import knowledge, learn, make_place


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


def test_it(place, tmp_path):
    store, repository, state = place
    live = Manager.open(repository, state)
    with faulty(state) as source:
        machine = Machine(repository, tmp_path / "copy", source.url)
        with machine.following() as following:
            step(following)
            assert following.copy.is_whole
            for name in ("new-a", "new-b", "new-c"):
                live.add(name, knowledge(store, name))
            until_whole(following)
            assert same((repository, state), machine)
            random_table(store, "law", 1, ("root", 1), 2000, seed=3)
            live.adopt_domain("law", 1, store.table_folder("law", 1))
            random_tenant(store, TenantFile("lawyer", 1, "law", 1, "classify", ["x", "y"], 4), 0.3, seed=60)
            live.add("lawyer", knowledge(store, "lawyer"))
            until_whole(following)
            assert same((repository, state), machine)
            live.delete("new-a")
            live.compact()
            until_whole(following)
            assert same((repository, state), machine)
            print(machine.said)
            print([a for a in source.asked if 'CURRENT' not in a])
            print([ (f, f.read_text()) for f in (state/"toy/readers").iterdir()])
