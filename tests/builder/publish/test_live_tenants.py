"""Tenants of a live state: added, updated, rolled back, deleted, compacted; cut anywhere, whole or not at all."""

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from builder.publish.export import export
from builder.publish.live import add_tenant, update_tenant
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantFile
from hplm.adapters.bank import Bank
from hplm.adapters.layout import adapter_layout
from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.tenants.banks import Banks
from hplm.tenants.knowledge import Knowledge
from hplm.tenants.manager import Manager
from hplm.tenants.registry import Registry
from hplm.tenants.snapshot import LIVE, Snapshot
from testing.random_store import random_tenant
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.builder.places import make_place, served

TEXT = " ".join(WORDS[:12])


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


def learn(store, name, version, seed):
    known = next(tenant for tenant in store.tenants() if tenant.id == name)
    random_tenant(store, replace(known, version=version), 0.3, seed)


def answer(place, tenant_id, state=True):
    _, repository, folder = place
    return Reference.open(repository / "toy/1", folder if state else None).forward(TEXT, tenant_id)


def exported_answer(place, tenant_id):
    """What the same tenant answers when everything is exported anew."""
    store, repository, _ = place
    fresh = repository.with_name("fresh")
    export(store, fresh, ServingOptions())
    return Reference.open(fresh / "toy/1").forward(TEXT, tenant_id)


@pytest.mark.parametrize("name", ["new-a", "new-c"])
def test_what_is_added_answers_as_what_is_exported(place, name):
    store, repository, state = place
    live = Manager.open(repository, state)
    before = answer(place, "tenant-0")
    change = add_tenant(live, store, name)
    assert (change.generation, change.before, change.after) == (1, None, 1)
    assert (answer(place, name) == exported_answer(place, name)).all()
    assert (answer(place, "tenant-0") == before).all()
    with pytest.raises(InvalidInput, match="served already"):
        add_tenant(live, store, name)


def test_updates_go_on_from_what_is_served_and_back(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    first = answer(place, "tenant-0")
    learn(store, "tenant-0", 2, seed=60)
    assert update_tenant(live, store, "tenant-0").after == 2
    second = answer(place, "tenant-0")
    assert (second == exported_answer(place, "tenant-0")).all() and (second != first).any()
    assert live.roll_back("tenant-0").after == 1 and (answer(place, "tenant-0") == first).all()
    with pytest.raises(InvalidInput, match="no version before 1"):
        live.roll_back("tenant-0")
    learn(store, "tenant-0", 3, seed=61)
    assert update_tenant(live, store, "tenant-0").after == 3  # 2 was given to other knowledge
    learn(store, "new-a", 5, seed=62)
    assert add_tenant(live, store, "new-a").after == 5  # as the store calls it
    random_tenant(store, TenantFile("tenant-0", 4, "root", 1, "classify", ["other"], 4), 0.3, seed=1)
    with pytest.raises(InvalidInput, match="an update keeps both"):
        update_tenant(live, store, "tenant-0")


def test_who_is_deleted_is_unknown_and_its_record_rests_before_it_is_used_again(place, monkeypatch):
    store, repository, state = place
    live = Manager.open(repository, state)
    for name in ("new-a", "new-b"):
        add_tenant(live, store, name)
    records = {name: served(place).view.snapshot.find(name).adapter.index for name in ("new-a", "new-b")}
    assert records == {"new-a": 0, "new-b": 1}
    live.delete("new-a")
    with pytest.raises(NoTenant):
        served(place).view.snapshot.find("new-a")
    add_tenant(live, store, "new-a")
    again = served(place).view.snapshot.find("new-a")
    assert again.adapter.index == 2 and again.uid == 5  # a stranger to whoever still holds the old one
    live.delete("new-a")
    monkeypatch.setattr("hplm.tenants.registry.time.time", lambda: time.monotonic() + 10**10)
    add_tenant(live, store, "new-a")
    assert served(place).view.snapshot.find("new-a").adapter.index == 0


def test_compacting_wins_back_what_is_gone_and_changes_no_answer(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    for name in ("new-a", "new-b", "new-c"):
        add_tenant(live, store, name)
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
    """Two of them come about where a manager dies, or another one writes, before the old bank is removed."""
    store, repository, state = place
    live, glob = Manager.open(repository, state), Path.glob
    unseen = live.state.banks  # so that each tenant begins a bank of its own
    for name in ("new-a", "new-b"):
        with monkeypatch.context() as apart:
            apart.setattr(Path, "glob", lambda self, pattern: [] if self == unseen else glob(self, pattern))
            add_tenant(live, store, name)
    kept = {name: answer(place, name) for name in ("new-a", "new-b")}
    banks = {served(place).view.snapshot.find(name).adapter.bank for name in kept}
    assert len(banks) == 2
    learn(store, "new-a", 2, seed=61)
    update_tenant(live, store, "new-a")
    live.roll_back("new-a")
    live.compact()
    assert len({served(place).view.snapshot.find(name).adapter.bank for name in kept}) == 1
    for name, expected in kept.items():
        assert (answer(place, name) == expected).all()


def test_a_bank_s_name_is_never_given_twice(place):
    """Readers keep banks open by name: another file of the same name would be read as the old one."""
    store, repository, state = place
    live, names = Manager.open(repository, state), set()
    for _ in range(3):
        add_tenant(live, store, "new-a")
        name = served(place).view.snapshot.find("new-a").adapter.bank
        assert name not in names and name.startswith(LIVE)
        names.add(name)
        live.delete("new-a")


def test_keys_and_limits_stay_through_versions(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    secret, key = live.add_key("tenant-0")
    live.limit("tenant-0", rate=5.0, deadline_us=1000)
    learn(store, "tenant-0", 2, seed=60)
    update_tenant(live, store, "tenant-0")
    _, second = live.add_key("tenant-0")
    live.roll_back("tenant-0")
    tenant = served(place).view.snapshot.find("tenant-0")
    assert (tenant.keys, tenant.rate, tenant.deadline_us, tenant.version) == ((key, second), 5.0, 1000, 1)
    for file in live.state.folder.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
    live.revoke_key("tenant-0", key.id)
    with pytest.raises(InvalidInput, match=r"last key of tenant 'tenant-0', which would be open"):
        live.revoke_key("tenant-0", second.id)
    with pytest.raises(InvalidInput, match=f"has no key '{key.id}': it has {second.id}"):
        live.revoke_key("tenant-0", key.id)
    assert [entry["action"] for entry in live.registry.audit()].count("tenant key add") == 2


def test_what_cannot_be_served_is_refused(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    random_tenant(store, TenantFile("lost", 1, "law", 7, "classify", ["x"], 4), 0.3, seed=1)
    with pytest.raises(InvalidInput, match="version 7 of domain 'law', which is not served"):
        add_tenant(live, store, "lost")
    with pytest.raises(InvalidInput, match=r"'nobody' is not in .*: known are"):
        add_tenant(live, store, "nobody")
    with pytest.raises(InvalidInput, match="'nobody' is not served"):
        live.delete("nobody")
    knowledge = Knowledge("root", 1, "span", ("start",), (None, {}), None)
    with pytest.raises(InvalidInput, match="'one' has 1 labels: one of the task span has 2"):
        live.add("one", knowledge)
    with pytest.raises(InvalidInput, match="'two' has 2 labels: one of the task regress has 1"):
        live.add("two", replace(knowledge, task="regress", labels=("a", "b")))


def test_a_bank_that_cannot_be_opened_is_in_the_way_of_nobody_else(place, caplog):
    store, repository, state = place
    live = Manager.open(repository, state)
    add_tenant(live, store, "new-a")
    name = served(place).view.snapshot.find("new-a").adapter.bank
    with open(live.state.bank(name), "r+b") as file:
        file.write(b"?")
    add_tenant(live, store, "new-b")  # of the same layout
    assert (answer(place, "new-b") == exported_answer(place, "new-b")).all()
    assert f"{live.state.bank(name)} has no readable header" in caplog.text
    with pytest.raises(Broken, match=r"has no readable header: bring the state back with `hplm restore`"):
        answer(place, "new-a")
    assert update_tenant(live, store, "new-a").after == 2
    assert (answer(place, "new-a") == exported_answer(place, "new-a")).all()


def test_a_bank_that_a_change_has_begun_and_cannot_read_is_not_begun_again(place, monkeypatch):
    """Else the second record would lie where the first one is promised."""
    live = Manager.open(place[1], place[2])
    layout = adapter_layout(CONFIG, "lora", 3)
    layers = [{name: torch.zeros(shape) for name, shape in layout.shapes.items()}] * layout.layers
    with pytest.raises(Broken, match="which this change has begun, cannot be read"), live.registry.change("test") as change:
        first = live.banks.put(change, layout, 1001, 1, layers)
        before = live.state.bank(first.bank).read_bytes()
        monkeypatch.setattr(type(live.state), "open_bank", lambda *_: (_ for _ in ()).throw(Broken("too many open files")))
        live.banks.put(change, layout, 1002, 1, layers)
    assert live.state.bank(first.bank).read_bytes() == before


def test_what_cannot_be_tidied_away_costs_no_change(place, monkeypatch, caplog):
    store, repository, state = place
    live = Manager.open(repository, state)

    def denied(*_):
        raise PermissionError("another user's file")

    monkeypatch.setattr(Registry, "_sweep", denied)
    assert add_tenant(live, store, "new-a").after == 1
    assert served(place).view.snapshot.find("new-a").version == 1 and "another user's file" in caplog.text


def test_a_change_is_made_and_published_if_a_backup_begins_as_soon_as_it_is_decided(place, monkeypatch, caplog):
    live, opened, backup = Manager.open(place[1], place[2]), Registry._opened, contextlib.ExitStack()
    begins = iter([False, True])  # as the registry is opened to decide, and to publish
    monkeypatch.setattr("hplm.tenants.registry.PATIENCE", 0.1)

    def opened_after_a_backup(registry):
        if registry is live.registry and next(begins):
            backup.enter_context(Manager.open(place[1], place[2]).registry.frozen())
        return opened(registry)

    monkeypatch.setattr(Registry, "_opened", opened_after_a_backup)
    with backup:
        secret, key = live.add_key("tenant-0")
    assert secret.startswith("hplm_") and "another manager has been changing" in caplog.text
    assert served(place).view.snapshot.find("tenant-0").keys == (key,)


def test_a_change_that_could_not_be_published_is_when_its_readers_are_waited_for(place, monkeypatch, caplog):
    live = Manager.open(place[1], place[2])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Registry, "_publish", full)
        secret, key = live.add_key("tenant-0")
    assert secret.startswith("hplm_") and "No space left" in caplog.text
    assert served(place).view.snapshot.generation == 0
    assert live.settle_now() == [] and served(place).view.snapshot.find("tenant-0").keys == (key,)


def test_a_new_key_is_not_lost_where_servers_cannot_be_seen(place, monkeypatch, caplog):
    live = Manager.open(place[1], place[2])
    live.add_key("tenant-0")

    def denied(*_):
        raise PermissionError("another user's file")

    monkeypatch.setattr("hplm.tenants.state.State.wait_for_readers", denied)
    assert live.settle_now() == [] and "another user's file" in caplog.text


MOMENTS = [
    (Manager, "put"),
    (Banks, "put"),
    (Registry, "_write"),
    (Snapshot, "save"),
    (Registry, "_publish"),
    (Registry, "_sweep"),
]


@pytest.mark.parametrize("owner, moment", MOMENTS, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("action", ["add", "update", "delete"])
def test_a_model_check_of_every_step(place, monkeypatch, owner, moment, after, action):
    """Cut before or after any step, there is the old state or the new one; and the next change works."""
    store, repository, state = place
    live = Manager.open(repository, state)
    learn(store, "tenant-0", 2, seed=60)
    old = {name: answer(place, name) for name in ("tenant-0", "tenant-1")}

    class Cut(BaseException):
        pass

    real = getattr(owner, moment)

    def cut(*arguments, **options):
        if after:
            real(*arguments, **options)
        raise Cut

    def act():
        return {
            "add": lambda: add_tenant(live, store, "new-a"),
            "update": lambda: update_tenant(live, store, "tenant-0"),
            "delete": lambda: live.delete("tenant-0"),
        }[action]()

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, cut)
        with contextlib.suppress(Cut):
            act()
    generation = live.registry.current().generation
    assert generation in (0, 1)
    tenants = {tenant.id: tenant.version for tenant in served(place).view.snapshot.tenants}
    new = {"add": {"new-a": 1, "tenant-0": 1}, "update": {"tenant-0": 2}, "delete": {}}[action] | {"tenant-1": 1}
    assert tenants == (new if generation else {"tenant-0": 1, "tenant-1": 1})
    assert (answer(place, "tenant-1") == old["tenant-1"]).all()
    if not generation:
        act()
        assert (answer(place, "tenant-1") == old["tenant-1"]).all()
    add_tenant(live, store, "new-c")
    assert (answer(place, "new-c") == exported_answer(place, "new-c")).all()


KILLED = """
import os, random, signal, sys, threading, time
from pathlib import Path
from builder.publish.live import add_tenant
from builder.store.store import Store
from hplm.tenants.manager import Manager
store, repository, state, delay = Store(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
live, begun = Manager.open(repository, state), threading.Event()
def kill():
    begun.wait()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
while True:
    add_tenant(live, store, "new-a")
    print("added", flush=True)
    begun.set()
    live.delete("new-a")
    print("deleted", flush=True)
"""


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.15])
def test_killed_for_real_nothing_acknowledged_is_undone(place, delay):
    store, repository, state = place
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(store.folder), str(repository), str(state), str(delay)],
        stdout=subprocess.PIPE,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == -signal.SIGKILL
    said = done.stdout.decode().split()
    assert said[0] == "added"
    assert served(place).view.snapshot.generation >= len(said)  # what was acknowledged, readers have
    live = Manager.open(repository, state)
    live.registry.current()  # what had been decided and not said is finished by the next manager
    changes = [entry["action"].removeprefix("tenant ") for entry in live.registry.audit()]
    assert len(changes) in (len(said), len(said) + 1)
    assert [word.removesuffix("ed").replace("delet", "delete") for word in said] == changes[: len(said)]
    tenants = {tenant.id for tenant in served(place).view.snapshot.tenants}
    assert ("new-a" in tenants) == (len(changes) % 2 == 1)
    add_tenant(live, Store(store.folder), "new-b")
    assert (answer(place, "new-b") == exported_answer(place, "new-b")).all()


def test_a_state_of_another_format_is_refused_with_the_way_out(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    add_tenant(live, store, "new-a")
    snapshot = live.state.snapshots / "1"
    snapshot.write_text(snapshot.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(InvalidInput, match="format 1, this version of hplm reads 2"):
        served(place)
    live.state.registry.unlink()
    with pytest.raises(Broken, match="serves generation 1 and its registry knows 0: restore the state"):
        add_tenant(live, store, "new-b")
