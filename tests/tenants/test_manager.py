"""Changes of a live state: tenants, keys, limits and domains; published, waited for, and refused."""

import contextlib
import os
import time
from dataclasses import replace

import pytest

from hplm.errors import Broken, InvalidInput, NoTenant
from hplm.tenants.knowledge import Knowledge
from hplm.tenants.manager import Manager
from hplm.tenants.registry import Registry
from hplm.tenants.snapshot import FORMAT, PROMISES
from tests.places import knowledge, learn, served
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


def test_a_deleted_tenant_is_unknown_and_its_record_is_kept_for_a_while(place, monkeypatch):
    store, repository, state = place
    live = Manager.open(repository, state)
    for name in ("new-a", "new-b"):
        live.add(name, knowledge(store, name))
    records = {name: served(place).view.snapshot.find(name).adapter.index for name in ("new-a", "new-b")}
    assert records == {"new-a": 0, "new-b": 1}
    live.delete("new-a")
    with pytest.raises(NoTenant):
        served(place).view.snapshot.find("new-a")
    live.add("new-a", knowledge(store, "new-a"))
    again = served(place).view.snapshot.find("new-a")
    assert again.adapter.index == 2 and again.uid == 5  # another tenant, for readers that still hold the old record
    live.delete("new-a")
    monkeypatch.setattr("hplm.tenants.registry.time.time", lambda: time.monotonic() + 10**10)
    live.add("new-a", knowledge(store, "new-a"))
    assert served(place).view.snapshot.find("new-a").adapter.index == 0


def test_keys_and_limits_stay_the_same_in_all_versions(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    secret, key = live.add_key("tenant-0")
    live.limit("tenant-0", rate=5.0, homes=2, deadline_us=1000)
    learn(store, "tenant-0", 2, seed=60)
    live.update("tenant-0", knowledge(store, "tenant-0"))
    _, second = live.add_key("tenant-0")
    live.roll_back("tenant-0")
    tenant = served(place).view.snapshot.find("tenant-0")
    assert (tenant.keys, tenant.rate, tenant.homes, tenant.deadline_us, tenant.version) == ((key, second), 5.0, 2, 1000, 1)
    for file in live.state.folder.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
    live.revoke_key("tenant-0", key.id)
    with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", f"'{second.id}'")):
        live.revoke_key("tenant-0", second.id)
    with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", f"'{key.id}'", second.id)):
        live.revoke_key("tenant-0", key.id)
    assert [entry["action"] for entry in live.registry.audit()].count("tenant key add") == 2


def test_only_tenants_that_generate_promise_times_for_tokens(place):
    _, repository, state = place
    live = Manager.open(repository, state)
    for name in PROMISES:
        with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", "classify", f"'{name}'")):
            live.limit("tenant-0", rate=5.0, **{name: 1000})
    assert live.current().find("tenant-0").rate == 0


def test_tenants_that_cannot_be_served_are_refused(place):
    _, repository, state = place
    live = Manager.open(repository, state)
    with pytest.raises(InvalidInput, match=mentioning("'nobody'", "hplm tenant list")):
        live.delete("nobody")
    span = Knowledge("root", 1, "span", ("start",), (None, {}), None)
    with pytest.raises(InvalidInput, match=mentioning("'one'", 1, "span", 2)):
        live.add("one", span)
    with pytest.raises(InvalidInput, match=mentioning("'two'", 2, "regress", 1)):
        live.add("two", replace(span, task="regress", labels=("a", "b")))


def test_a_change_is_published_even_if_a_backup_starts_when_it_is_decided(place, monkeypatch, caplog):
    live, opened, backup = Manager.open(place[1], place[2]), Registry._opened, contextlib.ExitStack()
    begins = iter([False, True])  # the registry is opened to decide, and again to publish
    monkeypatch.setattr("hplm.tenants.registry.PATIENCE", 0.1)

    def opened_after_a_backup(registry):
        if registry is live.registry and next(begins):
            backup.enter_context(Manager.open(place[1], place[2]).registry.frozen())
        return opened(registry)

    monkeypatch.setattr(Registry, "_opened", opened_after_a_backup)
    with backup:
        secret, key = live.add_key("tenant-0")
    assert secret.startswith("hplm_") and mentions(caplog.text, live.state.folder)
    assert served(place).view.snapshot.find("tenant-0").keys == (key,)


def test_waiting_for_readers_publishes_a_change_that_could_not_be_published(place, monkeypatch, caplog):
    live = Manager.open(place[1], place[2])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Registry, "_publish", full)
        secret, key = live.add_key("tenant-0")
    assert secret.startswith("hplm_") and "No space left" in caplog.text
    assert served(place).view.snapshot.generation == 0
    assert live.settle_now() == [] and served(place).view.snapshot.find("tenant-0").keys == (key,)


def test_a_new_key_is_not_lost_if_readers_cannot_be_listed(place, monkeypatch, caplog):
    live = Manager.open(place[1], place[2])
    live.add_key("tenant-0")

    def denied(*_):
        raise PermissionError("another user's file")

    monkeypatch.setattr("hplm.tenants.state.State.wait_for_readers", denied)
    assert live.settle_now() == [] and "another user's file" in caplog.text


def test_the_next_change_removes_files_of_a_killed_manager(place):
    live = Manager.open(*place[1:])
    live.limit("tenant-0", rate=1.0)
    with live.state.aside() as held:
        left, new = live.state.folder / "aside-left", live.state.folder / "aside-new"
        for folder in (left, new):
            folder.mkdir()
            (folder / "values").write_bytes(b"a table")
        old = time.time() - 60
        for folder in (held, left):
            os.utime(folder, (old, old))
        live.limit("tenant-0", rate=5.0)
        assert held.exists() and new.exists() and not left.exists()


def test_a_state_of_another_format_is_refused_with_the_way_out(place):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    snapshot = live.state.snapshots / "1"
    snapshot.write_text(snapshot.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    with pytest.raises(InvalidInput, match=mentioning(snapshot, 1, 2, FORMAT)):
        served(place)
    live.state.registry.unlink()
    with pytest.raises(Broken, match=mentioning(live.state.folder, 1, 0)):
        live.add("new-b", knowledge(store, "new-b"))
