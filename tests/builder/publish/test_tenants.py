"""Tenants of a store are added to served ones and updated, without a restart."""

import pytest

from builder.publish.live import add_tenant, update_tenant
from builder.store.store import TenantFile
from hplm.errors import InvalidInput
from hplm.tenants.manager import Manager
from testing.random_store import random_tenant
from tests.places import answer, exported_answer, learn, make_place
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


@pytest.mark.parametrize("name", ["new-a", "new-c"])
def test_added_tenants_answer_like_exported_ones(place, name):
    store, repository, state = place
    live = Manager.open(repository, state)
    before = answer(place, "tenant-0")
    change = add_tenant(live, store, name)
    assert (change.generation, change.before, change.after) == (1, None, 1)
    assert (answer(place, name) == exported_answer(place, name)).all()
    assert (answer(place, "tenant-0") == before).all()
    with pytest.raises(InvalidInput, match=mentioning(repr(name), "hplm tenant update")):
        add_tenant(live, store, name)


def test_updates_follow_the_served_version_and_can_be_rolled_back(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    first = answer(place, "tenant-0")
    learn(store, "tenant-0", 2, seed=60)
    assert update_tenant(live, store, "tenant-0").after == 2
    second = answer(place, "tenant-0")
    assert (second == exported_answer(place, "tenant-0")).all() and (second != first).any()
    assert live.roll_back("tenant-0").after == 1 and (answer(place, "tenant-0") == first).all()
    with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", 1)):
        live.roll_back("tenant-0")
    learn(store, "tenant-0", 3, seed=61)
    assert update_tenant(live, store, "tenant-0").after == 3  # 2 was used for other weights
    learn(store, "new-a", 5, seed=62)
    assert add_tenant(live, store, "new-a").after == 5  # the store's version
    random_tenant(store, TenantFile("tenant-0", 4, "root", 1, "classify", ["other"], 4), 0.3, seed=1)
    with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", "classify")):
        update_tenant(live, store, "tenant-0")


def test_tenants_missing_in_the_store_or_the_state_are_refused(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    random_tenant(store, TenantFile("lost", 1, "law", 7, "classify", ["x"], 4), 0.3, seed=1)
    with pytest.raises(InvalidInput, match=mentioning("'lost'", 7, "'law'")):
        add_tenant(live, store, "lost")
    with pytest.raises(InvalidInput, match=mentioning("'nobody'", store.folder)):
        add_tenant(live, store, "nobody")
