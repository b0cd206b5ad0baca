"""Changes of a live state beyond what tests/tenants/test_truth.py cuts and compares."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.errors import Broken, InvalidInput
from hplm.tenants.backup import back_up, restore
from hplm.tenants.knowledge import Knowledge
from hplm.tenants.manager import Manager
from hplm.tenants.registry import Registry
from hplm.tenants.state import State
from tests.places import knowledge, served
from tests.support.message import mentioning

pytestmark = pytest.mark.slow


@pytest.fixture
def live(place):
    return Manager.open(*place[1:])


def test_a_secret_is_nowhere_on_disk_and_the_last_key_stays(live):
    secret, key = live.add_key("tenant-0")
    _, second = live.add_key("tenant-0")
    for file in live.state.folder.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
    live.revoke_key("tenant-0", key.id)
    for other in (key, second):
        with pytest.raises(InvalidInput, match=mentioning("'tenant-0'", f"'{other.id}'")):
            live.revoke_key("tenant-0", other.id)
    assert live.current().find("tenant-0").keys == (second,)


def test_a_task_has_as_many_labels_as_it_needs(live):
    span = Knowledge("root", 1, "span", ("start",), (None, {}), None)
    with pytest.raises(InvalidInput, match=mentioning("'one'", 1, "span", 2)):
        live.add("one", span)
    with pytest.raises(InvalidInput, match=mentioning("'two'", 2, "regress", 1)):
        live.add("two", replace(span, task="regress", labels=("a", "b")))


def test_waiting_for_readers_publishes_a_change_that_could_not_be_published(place, live, monkeypatch, caplog):
    """And the new key is not lost if these readers cannot be listed."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Registry, "_publish", full)
        secret, key = live.add_key("tenant-0")
    assert secret.startswith("hplm_") and "No space left" in caplog.text
    assert served(place).view.snapshot.generation == 0
    monkeypatch.setattr(State, "wait_for_readers", full)
    assert live.settle_now() == [] and served(place).view.snapshot.find("tenant-0").keys == (key,)


def test_the_next_change_removes_files_of_a_killed_manager(live):
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


def test_a_state_without_its_registry_takes_no_change(live):
    live.limit("tenant-0", rate=1.0)
    live.state.registry.unlink()
    with pytest.raises(Broken, match=mentioning(live.state.folder, 1, 0)):
        live.limit("tenant-0", rate=5.0)


def test_new_files_of_a_backup_keep_their_names_without_power(place, live, tmp_path, monkeypatch):
    """A file system may forget a new name until its folder is synced."""
    synced = set()
    live.add("new-a", knowledge(place[0], "new-a"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    back_up(live, tmp_path / "saved" / "one")
    restore(tmp_path / "saved" / "one", live.exported, State(tmp_path / "again" / "toy"))
    assert {tmp_path / "saved", tmp_path / "again"} <= synced
