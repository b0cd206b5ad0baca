"""Several managers change the domains of one live state at once: no change is lost, and each waits for its turn."""

import contextlib
import multiprocessing
import sqlite3

import pytest

from builder.publish.live import add_domain, update_domain
from hplm.errors import Broken
from hplm.tenants.manager import Manager
from hplm.tenants.registry import Busy
from testing.random_store import random_table
from tests.builder.publish.live_domains import served
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


def test_a_table_removed_after_the_copies_were_made_is_copied_within_the_change(place, monkeypatch, tmp_path):
    store, repository, state = place
    live = Manager.open(repository, state)
    monkeypatch.setattr("builder.publish.live._copies", lambda *_: contextlib.nullcontext(tmp_path / "copies"))
    assert len(update_domain(live, store, "bio").moved) == 8
    live.tables.open("bio", 2).verify()


def _manager(store_folder, repository, state, names):
    from builder.store.store import Store

    live = Manager.open(repository, state)
    for name in names:
        add_domain(live, Store(store_folder), name)


def test_two_managers_at_once_lose_no_change(place):
    store, repository, state = place
    names = [f"d{i}" for i in range(8)]
    for name in names:
        random_table(store, name, 1, ("root", 1), 300, seed=3)
    context = multiprocessing.get_context("fork")
    managers = [context.Process(target=_manager, args=(store.folder, repository, state, names[half::2])) for half in range(2)]
    for manager in managers:
        manager.start()
    for manager in managers:
        manager.join(60)
        assert manager.exitcode == 0
    snapshot = served(repository, state).view.snapshot
    assert snapshot.generation == 8 and {branch.domain for branch in snapshot.branches} == {"root", "bio", *names}


def test_a_locked_registry_delays_managers_but_no_readers(place, monkeypatch):
    store, repository, state = place
    live = Manager.open(repository, state)
    update_domain(live, store, "bio", share=0.5)
    monkeypatch.setattr("hplm.tenants.registry.PATIENCE", 0.1)
    other = sqlite3.connect(live.state.registry, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match=mentioning(live.state.folder)):
        update_domain(live, store, "bio")
    assert served(repository, state).view.snapshot.generation == 1
    other.execute("ROLLBACK")
    live.state.registry.write_bytes(b"not a database at all" * 100)
    with pytest.raises(Broken, match=mentioning(live.state.registry)):
        update_domain(live, store, "bio")
    assert served(repository, state).view.snapshot.generation == 1
