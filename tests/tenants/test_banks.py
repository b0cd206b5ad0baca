"""Banks of a live state: places of records, compacting, and banks that cannot be read."""

from pathlib import Path

import pytest
import torch

from hplm.adapters.bank import Bank
from hplm.adapters.layout import adapter_layout
from hplm.errors import Broken
from hplm.tenants import banks
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIVE
from testing.toy import CONFIG
from tests.places import answer, exported_answer, knowledge, learn, served
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


def test_compacting_joins_banks_of_one_layout(place, monkeypatch):
    """There are two if a manager is killed, or another one writes, before the old bank is removed."""
    store, repository, state = place
    live, glob = Manager.open(repository, state), Path.glob
    unseen = live.state.banks  # so that each tenant starts a bank of its own
    for name in ("new-a", "new-b"):
        with monkeypatch.context() as apart:
            apart.setattr(Path, "glob", lambda self, pattern: [] if self == unseen else glob(self, pattern))
            live.add(name, knowledge(store, name))
    kept = {name: answer(place, name) for name in ("new-a", "new-b")}
    banks = {served(place).view.snapshot.find(name).adapter.bank for name in kept}
    assert len(banks) == 2
    learn(store, "new-a", 2, seed=61)
    live.update("new-a", knowledge(store, "new-a"))
    live.roll_back("new-a")
    live.compact()
    assert len({served(place).view.snapshot.find(name).adapter.bank for name in kept}) == 1
    for name, expected in kept.items():
        assert (answer(place, name) == expected).all()


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


def test_a_bank_that_a_change_has_started_and_cannot_read_is_not_started_again(place, monkeypatch):
    """Otherwise the second record would be written over the first one."""
    live = Manager.open(place[1], place[2])
    layout = adapter_layout(CONFIG, "lora", 3)
    layers = [{name: torch.zeros(shape) for name, shape in layout.shapes.items()}] * layout.layers
    with pytest.raises(Broken, match=mentioning(live.state.banks)), live.registry.change("test") as change:
        first = live.banks.put(change, layout, 1001, 1, layers)
        before = live.state.bank(first.bank).read_bytes()
        monkeypatch.setattr(banks, "open_bank", lambda *_: (_ for _ in ()).throw(Broken("too many open files")))
        live.banks.put(change, layout, 1002, 1, layers)
    assert live.state.bank(first.bank).read_bytes() == before
