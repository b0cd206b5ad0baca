"""Changes of a live state beyond what tests/tenants/test_truth.py cuts and compares."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from builder.publish.live import Trained
from builder.store.store import TenantVersion
from hplm.calibration import Calibration
from hplm.errors import Broken, InvalidInput, OutOfCapacity
from hplm.location import location_of
from hplm.registry.folder import LOCK, Folder
from hplm.registry.pointer import CopiedRegistry
from hplm.registry.store import Away, Busy, Conflict, Denied
from hplm.tenants.backup import back_up, restore
from hplm.tenants.embedding import Embedding
from hplm.tenants.knowledge import TenantKnowledge
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import PATIENCE
from hplm.tenants.state_folder import REST_SECONDS
from testing.bucket import S3, bucket
from testing.random_store import random_exit_knowledge, random_knowledge
from tests.places import knowledge, learn
from tests.support.faulty_store import FaultyStore
from tests.support.message import refusing
from tests.support.wait import Clock

pytestmark = pytest.mark.slow


def test_a_secret_is_nowhere_on_disk_and_the_last_key_stays(live):
    secret, key = live.add_key("tenant-0")
    _, second = live.add_key("tenant-0")
    for file in live.state.folder.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
    live.revoke_key("tenant-0", key.id)
    for other in (key, second):
        with refusing(InvalidInput, "'tenant-0'", f"'{other.id}'"):
            live.revoke_key("tenant-0", other.id)
    assert live.current().find("tenant-0").keys == (second,)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"task": "span", "labels": ("start",)}, [1, "span", 2]),
        ({"task": "regress"}, [2, "regress", 1]),
        ({"task": "regress", "labels": ("x",), "calibration": Calibration()}, ["regress", "calibration"]),
        ({"task": "tag", "head": None}, ["tag"]),
        ({"task": "generate", "labels": ()}, ["generate"]),
        ({"task": "generate", "labels": ("a",), "head": None}, ["generate"]),
        ({"task": "embed", "labels": (), "head": None}, ["embed"]),
        ({"embedding": Embedding(8)}, ["classify"]),
        ({"task": "embed", "labels": (), "head": None, "embedding": Embedding(33)}, [33, 32]),
        ({"labels": ("x", "x")}, ["'x'"]),
        ({"labels": ("x", "\ud800")}, ["UTF-8"]),
        ({"domain": "med"}, ["'med'"]),
    ],
    ids=str,
)
def test_a_version_whose_parts_do_not_belong_together_is_refused(place, live, changed, named):
    with refusing(InvalidInput, "'new-a'", *named):
        live.add("new-a", replace(knowledge(place[0], "new-a"), **changed))
    assert not live.current().generation, f"{changed} was served"


def test_vectors_are_refused_beside_an_export_without_that_output(place, live):
    own = replace(knowledge(place[0], "new-a"), task="embed", labels=(), head=None, embedding=Embedding(16))
    config = live.folder.parent / "config.pbtxt"
    written = config.read_text("utf-8")
    config.write_text(written.replace("EMBEDDING", "OTHER"), "utf-8")
    with refusing(InvalidInput, "'new-a'", "EMBEDDING", "--settings-only"):
        live.add("new-a", own)
    config.write_text(written, "utf-8")
    live.add("new-a", own)
    with refusing(InvalidInput, "'new-a'", "embed", 16):
        live.update("new-a", replace(own, embedding=Embedding(8)))
    live.update("new-a", replace(own, embedding=Embedding(16, normalised=False)))
    assert live.current().find("new-a").embedding == Embedding(16, normalised=False)


def test_the_same_content_is_published_once(place, live):
    """A job that is run again leaves the version to which a rollback returns."""
    store = place[0]

    def published(name="new-a"):
        (done,) = Trained(live, store, [name]).publish_all().tenants
        return done.before, done.after

    assert [published(), published()] == [(None, 1), (1, 1)]
    learn(store, "new-a", 2, seed=7)
    files = [published()] and sorted(live.state.folder.rglob("*"))
    assert published() == (2, 2) and sorted(live.state.folder.rglob("*")) == files and live.current().generation == 2
    assert live.roll_back("new-a").after == 1
    assert published() == (1, 3)  # what was rolled back is another content


def test_numbers_that_0_1_0_had_calibrated_are_served_without_until_an_update_removes_that(place, live, caplog):
    file = TenantVersion("number", 1, "root", 1, "regress", ["value"], 4)
    own, exits = random_knowledge(place[0].config, file, 0.3, seed=1), random_exit_knowledge(place[0].config, file)
    (first, *others) = exits.exits.calibrations
    exits = replace(exits, exits=replace(exits.exits, calibrations=(replace(first, kind="interval"), *others)))
    old = replace(own, calibration=Calibration("bins"), exits=exits)
    with mock.patch.object(TenantKnowledge, "check"):
        assert live.publish({"number": lambda: old}).tenants[0].after == 1
    served = Manager.open(*place[1:]).current().find("number")
    assert (served.calibration, served.exits) == (None, None) and served.head is not None
    read = TenantKnowledge.read(old.packed(), 1)
    for kind in ("'bins'", "'interval'"):
        assert [kind in one.message for one in caplog.records].count(True) == 2, "one line of the registry, one of the file"
    assert live.publish({"number": lambda: read}).tenants[0].after == 2 and (read.calibration, read.exits) == (None, None)


def test_a_new_key_is_not_lost_where_the_disk_is_full_after_it(live):
    secret, key = live.add_key("tenant-0")
    with FaultyStore(live.state.folder, decides="CURRENT").at(1, FaultyStore.fail):
        late = live.settle()
    assert secret.startswith("hplm_") and late == [] and live.current().find("tenant-0").keys == (key,)


class Full(Folder):
    """A disk without room."""

    def put(self, name, content):
        raise OutOfCapacity


def test_a_full_disk_changes_nothing(live):
    (_, key), _ = live.add_key("tenant-0"), live.add_key("tenant-0")
    before, store = live.current(), live.registry.store
    live.registry.store = Full(live.state.folder)
    for change in (
        lambda: live.add_key("tenant-0"),
        lambda: live.revoke_key("tenant-0", key.id),
        lambda: live.delete("tenant-1"),
    ):
        with pytest.raises(OutOfCapacity):
            change()
    assert live.current().tenants == before.tenants
    live.registry.store = store
    live.delete("tenant-0")
    assert "tenant-0" not in {tenant.id for tenant in live.current().tenants}


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES])
def test_where_nobody_may_write_it_is_said_that_nothing_was_changed(live, monkeypatch, reason):
    def fails(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("hplm.registry.folder._fill", fails)
    for change in (lambda: live.add_key("tenant-0"), lambda: live.delete("tenant-0")):
        with refusing(Denied, live.state.folder, os.strerror(reason), "nothing was changed"):
            change()


@pytest.mark.parametrize(
    ("where", "broken", "kind", "opens"),
    [
        (
            "state",
            lambda _: FaultyStore(Path("state"), decides="CURRENT").at(1, FaultyStore.fail),
            OutOfCapacity,
            "still opens",
        ),
        ("s3://bucket/hplm", lambda server: server.denying("PUT"), Denied, "still opens"),
        ("s3://bucket/hplm", S3.stopped, Away, "may still open"),
    ],
)
def test_a_revocation_that_cannot_be_written_says_that_the_key_opens(place, tmp_path, monkeypatch, where, broken, kind, opens):
    monkeypatch.chdir(tmp_path)
    with bucket() as server:
        live = Manager.open(place[1], location_of(where))
        live.registry.begin()
        (_, first), _ = live.add_key("tenant-0"), live.add_key("tenant-0")
        with broken(server), refusing(kind, where, first.id, opens, "'tenant-0'"):
            live.revoke_key("tenant-0", first.id)
        assert first in live.current().find("tenant-0").keys
        with mock.patch.object(live.registry.store, "delete", lambda _: server.stop()):  # it is away when the change is made
            live.revoke_key("tenant-0", first.id)
        server.go_on()
        assert first not in live.current().find("tenant-0").keys


def on_a_clock(place):
    """Returns a manager of the state, and its time."""
    clock = Clock(time.time())
    return Manager.open(*place[1:], clock=clock), clock


def test_what_was_deleted_leaves_the_disk_a_minute_later(place):
    """Requests in flight may need it until then."""
    live, clock = on_a_clock(place)
    live.add("new-a", knowledge(place[0], "new-a"))
    (record,) = live.state.records.iterdir()
    live.delete("new-a")
    assert live.compact() == 0 and record.exists()
    clock.seconds += REST_SECONDS + 1
    size = record.stat().st_size
    assert live.compact() == size and not record.exists()
    live.add("new-a", knowledge(place[0], "new-a"))
    (again,) = live.state.records.iterdir()
    assert again.name != record.name  # names are used once
    live.delete("new-a")
    clock.seconds += REST_SECONDS + 1
    live.limit("tenant-0", rate=5.0)
    assert not again.exists()


class Lossy(Folder):
    """Each swap is made, but the first one seems to have met another manager, and the answer of later ones is lost."""

    swaps = 0

    def swap(self, content, seen):
        super().swap(content, seen)
        self.swaps += 1
        raise Conflict if self.swaps == 1 else Away("no answer")


def test_a_change_whose_answer_was_lost_is_made_once(live):
    live.registry.store = store = Lossy(live.state.folder)
    for number in (1, 2):
        live.add_key("tenant-0")
        assert len(live.current().find("tenant-0").keys) == number == live.current().generation == store.swaps


def test_a_change_that_always_meets_others_gives_up(place):
    live, clock = on_a_clock(place)

    class Crowded(Folder):
        def swap(self, content, seen):
            clock.seconds += PATIENCE / 4
            raise Conflict

    live.registry.store = Crowded(live.state.folder)
    with refusing(Busy, live.state.folder):
        live.limit("tenant-0", rate=5.0)
    assert not list(live.state.snapshots.glob("*"))


def test_a_broken_snapshot_of_a_state_is_to_be_restored_because_another_export_would_refuse_the_state(live):
    live.add_key("tenant-0")
    (snapshot,) = live.state.snapshots.iterdir()
    snapshot.write_text("{")
    for read in (lambda: live.state.load(1), live.current):
        with refusing(Broken, snapshot, "restore the registry"):
            read()


def test_a_copy_takes_no_changes(live):
    pointer = live.registry.pointer()
    copied = msgspec.structs.replace(pointer, copied=CopiedRegistry("s3://bucket/toy", 3))
    live.registry.store.swap(copied.written(), pointer.written())
    with refusing(InvalidInput, "s3://bucket/toy"):
        live.limit("tenant-0", rate=5.0)


def test_a_backup_and_what_is_restored_stay_without_power(place, live, tmp_path):
    """A file system may forget a new name until its folder is synced."""
    store, saved = FaultyStore(tmp_path, decides="CURRENT"), tmp_path / "new" / "saved" / "one"
    live.add("new-a", knowledge(place[0], "new-a"))
    with store.at(0, FaultyStore.fail):
        back_up(live, saved)
        store.unsynced.clear()  # its own CURRENT decides nothing yet
        restore(saved, Manager.open(place[1], tmp_path / "new" / "state").registry, accept_old_keys=True)
    assert [name for name in store.unsynced if not name.endswith(LOCK)] == []
