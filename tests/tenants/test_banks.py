"""Banks of a live state: places of records, compacting, and banks that cannot be read."""

import time

import pytest

from hplm.adapters.bank import Bank
from hplm.errors import Broken
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIVE
from tests.places import answer, exported_answer, knowledge, served
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


def test_compacting_frees_deleted_records_and_changes_no_answer(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    for name in ("new-a", "new-b", "new-c"):
        live.add(name, knowledge(store, name))
    kept = {name: answer(place, name) for name in ("new-b", "new-c")}
    live.delete("new-a")
    secret = Bank(live.state.bank(served(place).view.snapshot.find("new-b").adapter.bank))
    assert secret.records == 2
    assert live.compact() > 0
    for name, expected in kept.items():
        assert (answer(place, name) == expected).all()
    tenant = served(place).view.snapshot.find("new-b")
    assert Bank(live.state.bank(tenant.adapter.bank)).records == 1 and tenant.adapter.index == 0
    assert live.compact() == 0


def test_the_record_of_a_deleted_tenant_is_kept_for_a_while(place, monkeypatch):
    store, repository, state = place
    live = Manager.open(repository, state)
    for name in ("new-a", "new-b"):
        live.add(name, knowledge(store, name))
    live.delete("new-a")
    live.add("new-a", knowledge(store, "new-a"))
    again = live.current().find("new-a")
    assert again.adapter.index == 2 and again.uid == 5  # another tenant, for readers that still hold the old record
    live.delete("new-a")
    monkeypatch.setattr("hplm.tenants.registry.time.time", lambda: time.monotonic() + 10**10)
    live.add("new-a", knowledge(store, "new-a"))
    assert live.current().find("new-a").adapter.index == 0


def test_the_name_of_a_bank_is_never_used_twice(place):
    """Readers keep banks open by name, so they would take another file of that name for the old one."""
    store, repository, state = place
    live, names = Manager.open(repository, state), set()
    for _ in range(3):
        live.add("new-a", knowledge(store, "new-a"))
        name = served(place).view.snapshot.find("new-a").adapter.bank
        assert name not in names and name.startswith(LIVE)
        names.add(name)
        live.delete("new-a")


def test_a_bank_that_cannot_be_opened_does_not_stop_other_changes(place, caplog):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    name = served(place).view.snapshot.find("new-a").adapter.bank
    with open(live.state.bank(name), "r+b") as file:
        file.write(b"?")
    live.add("new-b", knowledge(store, "new-b"))  # of the same layout
    assert (answer(place, "new-b") == exported_answer(place, "new-b")).all()
    assert mentions(caplog.text, live.state.bank(name))
    with pytest.raises(Broken, match=mentioning(live.state.bank(name), "hplm restore")):
        answer(place, "new-a")
    assert live.update("new-a", knowledge(store, "new-a")).after == 2
    assert (answer(place, "new-a") == exported_answer(place, "new-a")).all()
