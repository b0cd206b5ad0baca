"""Changes of a live state beyond what tests/tenants/test_truth.py cuts and compares."""

import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from hplm.errors import InvalidInput, OutOfCapacity
from hplm.registry import folder
from hplm.registry.folder import RESERVE, Folder
from hplm.registry.pointer import Source
from hplm.registry.store import Away, Busy, Conflict, Denied, place_of
from hplm.tenants.backup import back_up, restore
from hplm.tenants.knowledge import Knowledge
from hplm.tenants.manager import Manager
from hplm.tenants.state import REST_SECONDS, State
from testing.bucket import bucket
from tests.places import knowledge
from tests.support.message import mentioning
from tests.support.wait import Clock

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


def test_a_new_key_is_not_lost_where_readers_cannot_be_listed(live, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(State, "wait_for_readers", full)
    secret, key = live.add_key("tenant-0")
    assert secret.startswith("hplm_") and live.settle_now() == [] and live.current().find("tenant-0").keys == (key,)


def test_a_full_disk_is_said_with_the_way_out_and_changes_nothing(live, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    before = live.current()
    with (
        monkeypatch.context() as disk,
        pytest.raises(OutOfCapacity, match=mentioning(live.state.folder, "nothing was changed")),
    ):
        disk.setattr("hplm.registry.folder._fill", full)
        live.delete("tenant-0")
    assert live.current().tenants == before.tenants


@pytest.mark.parametrize(
    "remove", [lambda live, key: live.revoke_key("tenant-0", key), lambda live, _: live.delete("tenant-0")]
)
def test_a_full_disk_has_a_reserve_for_removals(live, monkeypatch, remove):
    (_, first), (_, second) = live.add_key("tenant-0"), live.add_key("tenant-0")
    reserve, fill = live.state.folder / RESERVE, folder._fill
    assert (
        reserve.stat().st_blocks * 512
        >= reserve.stat().st_size
        > 2 * max(path.stat().st_size for path in live.state.snapshots.iterdir())
    )

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(folder, "_fill", lambda *given: full() if reserve.exists() else fill(*given))
        disk.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfCapacity):
            live.add_key("tenant-0")
        assert reserve.exists()
        remove(live, first.id)
        assert not reserve.exists()
    left = [tenant.keys for tenant in live.current().tenants if tenant.id == "tenant-0"]
    assert left in ([], [(second,)])
    live.add_key("tenant-1")
    assert reserve.exists()


def no_room(*_, **__):
    raise OSError(28, "No space left on device")


def denied(*_, **__):
    raise PermissionDeniedError("403 Forbidden")


def silent(*_, **__):
    raise GenericError("connection refused")


@pytest.mark.parametrize(
    ("where", "writes", "fails", "kind", "opens"),
    [
        ("state", "hplm.registry.folder._fill", no_room, OutOfCapacity, "still opens"),
        ("s3://bucket/hplm", "obstore.put", denied, Denied, "still opens"),
        ("s3://bucket/hplm", "obstore.put", silent, Away, "may still open"),
    ],
)
def test_a_revocation_that_cannot_be_written_says_that_the_key_opens(
    place, tmp_path, monkeypatch, where, writes, fails, kind, opens
):
    monkeypatch.chdir(tmp_path)
    with bucket():
        live = Manager.open(place[1], place_of(where))
        live.registry.begin()
        (_, first), _ = live.add_key("tenant-0"), live.add_key("tenant-0")
        live.registry.store.give_up_reserve()
        with monkeypatch.context() as broken, pytest.raises(kind, match=mentioning(where, first.id, opens, "'tenant-0'")):
            broken.setattr(writes, fails)
            live.revoke_key("tenant-0", first.id)
        assert first in live.current().find("tenant-0").keys
        live.revoke_key("tenant-0", first.id)
        assert first not in live.current().find("tenant-0").keys


def test_what_was_deleted_leaves_the_disk_a_minute_later(place, live, monkeypatch):
    """Requests in flight may need it until then."""
    live.add("new-a", knowledge(place[0], "new-a"))
    (record,) = live.state.records.iterdir()
    live.delete("new-a")
    assert live.compact() == 0 and record.exists()
    clock = Clock(time.time() + REST_SECONDS + 1)
    monkeypatch.setattr("hplm.tenants.registry.time", clock)
    size = record.stat().st_size
    assert live.compact() == size and not record.exists()
    live.add("new-a", knowledge(place[0], "new-a"))
    (again,) = live.state.records.iterdir()
    assert again.name != record.name  # names are used once
    live.delete("new-a")
    clock.seconds += REST_SECONDS + 1
    live.limit("tenant-0", rate=5.0)
    assert not again.exists()


def test_a_change_whose_answer_was_lost_is_made_once(live, monkeypatch):
    swap, calls = Folder.swap, []

    def lost(store, content, seen):
        swap(store, content, seen)
        calls.append(1)
        raise Conflict if len(calls) == 1 else Away("no answer")

    monkeypatch.setattr(Folder, "swap", lost)
    for number in (1, 2):
        live.add_key("tenant-0")
        assert len(live.current().find("tenant-0").keys) == number == live.current().generation == len(calls)


def test_a_change_that_always_meets_others_gives_up(live, monkeypatch):
    def never(store, content, seen):
        raise Conflict

    monkeypatch.setattr(Folder, "swap", never)
    monkeypatch.setattr("hplm.tenants.registry.time", Clock(time.time()))
    with pytest.raises(Busy, match=mentioning(live.state.folder)):
        live.limit("tenant-0", rate=5.0)
    assert not list(live.state.snapshots.glob("*"))


def test_a_copy_takes_no_changes(live):
    pointer = live.registry.pointer()
    copied = msgspec.structs.replace(pointer, copied=Source("s3://bucket/toy", 3))
    live.registry.store.swap(copied.written(), pointer.written())
    with pytest.raises(InvalidInput, match=mentioning("s3://bucket/toy")):
        live.limit("tenant-0", rate=5.0)


def test_new_files_of_a_backup_keep_their_names_without_power(place, live, tmp_path, monkeypatch):
    """A file system may forget a new name until its folder is synced."""
    synced = set()
    live.add("new-a", knowledge(place[0], "new-a"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    back_up(live, tmp_path / "saved" / "one")
    again = Manager.open(place[1], tmp_path / "again")
    restore(tmp_path / "saved" / "one", again.registry)
    assert {tmp_path / "saved", tmp_path / "again" / "toy", tmp_path / "again" / "toy" / "records"} <= synced
