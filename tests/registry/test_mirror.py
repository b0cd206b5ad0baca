"""The copy of a registry on another machine: what it serves while the registry changes, is away, or is another one."""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from hplm.errors import Broken, Draining, HplmError, InvalidInput, NoTenant
from hplm.registry import lease
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.registry.store import Absent, Away, opened, place_of
from hplm.tenants.authorize import admit
from hplm.tenants.backup import back_up, restore
from hplm.tenants.directory import Directory
from hplm.tenants.manager import Manager
from hplm.tenants.mirror import Mirror
from hplm.tenants.snapshot import files_of
from hplm.tenants.state import State
from testing.bucket import bucket
from tests.support.faulty_folder import FaultyFolder
from tests.support.message import refusing
from tests.support.wait import PATIENCE, Clock, Hold, eventually
from tests.tenants.truth import Change, Export, expect_same, seen

pytestmark = pytest.mark.slow

KINDS = ("add", "update", "roll back", "delete", "add key", "revoke key", "limit")
DOMAINS = ("copy domain", "delete domain", "update domain", "roll back domain")


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return Export(tmp_path_factory.mktemp("export"))


class Far:
    """A registry, its manager, and a machine with a copy of it."""

    def __init__(self, export, folder):
        self.clock = time
        self.export, self.folder, self.place = export, folder, folder / "registry"
        begin(Folder(self.place / "toy"))
        self.manager = Manager.open(export.repository, self.place)
        self.here = folder / "here"
        self.store = FaultyFolder(self.place / "toy")
        self.mirror = self.started()

    def started(self):
        self.state = State(self.here / "toy")
        return Mirror(self.export.repository / "toy/1", self.store, self.state, self.clock)

    def restart(self):
        self.mirror.close()
        self.mirror = self.started()
        self.mirror.begin()

    def backbone(self):
        return self.export.read(self.here)

    def copied(self):
        """Returns the tenants of the copy by name."""
        generation = self.state.current()
        return {tenant.id: tenant for tenant in self.state.load(generation).tenants} if generation else {}

    def catch_up(self):
        def look():
            self.mirror.look()
            return self.mirror.is_whole

        eventually(look)
        self.mirror.look()

    def assert_same(self):
        expect_same(seen(self.backbone()), seen(self.export.read(self.place)), "the copy")


@pytest.fixture
def far(export, tmp_path):
    far = Far(export, tmp_path)
    yield far
    far.mirror.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_arrive_and_what_is_gone_is_gone_at_once(far, seed):
    """What a look cannot bring does not hold up the rest, and a tenant keeps its version until the new one is here."""
    chance = random.Random(seed)
    far.mirror.begin()
    reader, held, harm, only = far.backbone(), [], None, ""
    for step in range(25):
        for _ in range(2):
            kind = chance.choice(KINDS + DOMAINS)
            change = Change(kind, chance.choice(("zero", "one", "two")) if kind in KINDS else "", chance.randrange(4))
            with suppress(HplmError, StopIteration):  # what cannot be done now
                change.make(far.manager, far.export)
        if step == 8:
            back_up(far.manager, far.folder / "backup")
        elif step == 16:
            restore(far.folder / "backup", far.manager.registry)
        if chance.random() < 0.5:  # else it stays as it is
            harm, only = chance.choice((None, Away, Absent, Broken)), chance.choice(("records", "records", "plot", "snapshots"))

        def fault(name, harm=harm, only=only):
            if harm is not None and name.startswith(only):
                raise harm(f"{name} is not there")

        far.store.fault, before = fault, far.copied()
        with suppress(HplmError):
            far.mirror.look()
        now, copied = {tenant.id: tenant for tenant in far.manager.current().tenants}, far.copied()
        if harm is None or only != "snapshots":  # it was told
            for name, tenant in copied.items():
                assert name in now and tenant.uid == now[name].uid, f"{name} is served, but the registry has it no longer"
                assert (tenant.keys, tenant.rate) == (now[name].keys, now[name].rate), f"{name} is served as it was"
            for name, tenant in before.items():
                gone = name in now and tenant.uid == now[name].uid and name not in copied
                assert not gone, f"{name} is not served until its new version is here"
        reader.refresh()
        assert seen(reader)  # whatever has come, all that it names is there
        held.append((reader.view, seen(reader)))
        if chance.random() < 0.1:
            far.store.fault = lambda name: None
            far.restart()
    far.store.fault = lambda name: None
    far.catch_up()
    far.assert_same()
    for view, content in held[-3:]:  # requests on their way
        expect_same(seen(reader, view), content, f"a request of generation {view.snapshot.generation}")
    far.clock = Clock(1e6)
    far.restart()
    for _ in range(3):
        far.mirror.look()
        far.clock.seconds += 31  # of the minute that what is gone stays on the disk
    assert {path.name for path in far.state.records.iterdir()} <= files_of(far.copied().values())


def test_a_record_of_another_content_is_never_served(far):
    far.mirror.begin()
    far.manager.add("two", far.export.knowledge[0])
    (record,) = (far.place / "toy/records").iterdir()
    right = record.read_bytes()
    record.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with refusing(Broken, record):
        far.mirror.look()
    with pytest.raises(NoTenant):
        far.backbone().view.snapshot.find("two")
    asked = lease.load(far.state.seen)
    far.manager.add("three", far.export.knowledge[1])
    with refusing(Broken, record):
        far.mirror.look()
    assert lease.load(far.state.seen) > asked and far.backbone().view.snapshot.find("three")  # it holds up nothing else
    fresh = Mirror(far.export.repository / "toy/1", far.store, State(far.folder / "fresh/toy"))
    fresh.begin()  # nor a new server
    fresh.close()
    record.write_bytes(right)
    far.manager.limit("three", rate=1.0)
    far.mirror.look()
    far.assert_same()


def cut_off(far):
    """A table is added, and the copy is cut off while it comes. Returns the files that were asked for."""
    far.manager.adopt_domain("law", 1, far.export.store.table_folder("law", 1))
    asked = []

    def cut(name):
        if name.startswith("plot"):
            asked.append(name.rpartition("/")[2])
            if len(asked) == 3:
                raise Away("cut off")

    far.store.fault = cut
    far.mirror.look()

    def has_failed():
        with suppress(Away):
            far.mirror.raise_failure()
            return False
        return True

    eventually(has_failed)
    return asked


def test_an_interrupted_table_goes_on_with_the_file_where_it_stopped(far):
    far.mirror.begin()
    asked = cut_off(far)
    far.restart()
    far.catch_up()
    far.assert_same()
    assert len(asked) == len(set(asked)) + 1  # one was asked for twice


def test_a_table_that_is_deleted_on_its_way_is_asked_for_no_more_and_leaves_the_disk(far):
    far.clock = Clock(1e6)
    far.restart()
    cut_off(far)
    assert list(far.here.rglob("law/1-*/*"))
    far.manager.delete_domain("law")
    far.mirror.look()
    far.mirror.raise_failure()  # nothing is to come
    for _ in range(6):
        far.mirror.look()
        far.clock.seconds += 31
    assert not list(far.here.rglob("law/1-*"))


@pytest.fixture
def boot(monkeypatch):
    """The time since the machine was started, which only a test moves."""
    clock = Clock(lease.boot_time())
    monkeypatch.setattr(lease, "boot_time", clock.monotonic)
    return clock


def test_one_process_copies_all_before_anything_is_served_and_another_goes_on_when_it_ends(far, boot):
    far.manager.add("two", far.export.knowledge[0])
    far.manager.adopt_domain("law", 1, far.export.store.table_folder("law", 1))
    far.mirror.begin()
    far.assert_same()
    far.manager.limit("two", rate=1.0)
    boot.seconds += 1
    pauses, patient = Hold(), Clock()
    patient.sleep = lambda seconds: pauses.pass_through()
    other = Mirror(far.export.repository / "toy/1", far.store, State(far.here / "toy"), patient)
    with ThreadPoolExecutor(1) as pool, pauses:
        beginning = pool.submit(other.begin)
        pauses.until_reached()  # it waits, because it would serve an old copy
        boot.seconds += 1
        far.mirror.look()
        pauses.open()
        beginning.result(PATIENCE)
    far.assert_same()
    Mirror(far.export.repository / "toy/1", far.store, State(far.here / "toy"), boot).begin()  # where the registry is away
    far.manager.delete("two")
    other.look()
    assert far.backbone().view.snapshot.find("two")
    far.mirror.close()
    other.look()
    far.assert_same()
    other.close()
    far.mirror = far.started()


@pytest.mark.parametrize("other", ["begun anew", "put back", "of another export", "a registry here"])
def test_another_registry_is_refused_and_the_copy_stays(far, tmp_path, other):
    far.manager.add("two", far.export.knowledge[0])
    saved = shutil.copytree(far.place, tmp_path / "saved")
    far.manager.add_key("two")
    far.mirror.begin()
    if other == "begun anew":
        shutil.rmtree(far.place / "toy")
        begin(Folder(far.place / "toy"))
    elif other == "put back":
        shutil.rmtree(far.place)
        shutil.copytree(saved, far.place)
    elif other == "of another export":
        far.mirror.close()
        folder = shutil.copytree(far.export.repository, tmp_path / "another") / "toy/1"
        text = (folder / "tenants.json").read_text().replace('"export":"', '"export":"not ')
        (folder / "tenants.json").unlink()
        (folder / "tenants.json").write_text(text)
        far.mirror = Mirror(folder, far.store, State(tmp_path / "elsewhere/toy"))
    else:
        far.mirror.close()
        far.mirror = Mirror(far.export.repository / "toy/1", far.store, State(saved / "toy"))
    with pytest.raises(InvalidInput):
        far.mirror.look()
    if other in ("begun anew", "put back"):
        assert seen(far.backbone())[0]["two"].keys


def asked(backbone, tenant, secret=""):
    """Returns the tenant, if the lookup of this backbone admits it."""
    parameters = {"tenant": tenant, "authorization": f"Bearer {secret}"}
    return admit(backbone.view.snapshot, parameters, 0.0, backbone.is_stale).id


def test_after_the_lease_keyed_tenants_are_refused_and_others_served(export, tmp_path, monkeypatch, boot):
    monkeypatch.setenv("HPLM_MIRROR", str(tmp_path / "mirror"))
    with bucket() as server:
        place = place_of("s3://bucket/far")
        begin(opened(place / "toy"), lease_s=40.0)
        manager = Manager.open(export.repository, place)
        secret, _ = manager.add_key("zero")
        manager.add_key("zero")
        backbone = export.read(place)

        def look():
            backbone.mirror.look()
            backbone.refresh()

        look()
        assert asked(backbone, "zero", secret) == "zero" and asked(backbone, "one") == "one"
        assert Directory(export.repository, place).snapshots()[0].find("zero").keys
        server.stop()
        for passed, refused in ((39.0, False), (2.0, True)):
            boot.seconds += passed
            with pytest.raises(Away):
                look()
            assert backbone.age > 38 and asked(backbone, "one") == "one"
            if refused:
                with refusing(Draining, "registry"):
                    asked(backbone, "zero", secret)
                with pytest.raises(NoTenant):  # an unknown key learns nothing
                    asked(backbone, "zero", "wrong")
            else:
                assert asked(backbone, "zero", secret) == "zero"
        server.go_on()
        look()
        assert asked(backbone, "zero", secret) == "zero"
        backbone.mirror.close()


def test_a_key_is_dead_everywhere_when_revoke_says(export, tmp_path, boot):
    """At a server that is cut off just after it has looked, too. A lost CURRENT renews no lease."""
    begin(Folder(tmp_path / "toy"), lease_s=40.0)
    manager = Manager.open(export.repository, tmp_path)
    secret, key = manager.add_key("zero")
    manager.add_key("zero")
    backbone, began = export.read(tmp_path), time.time()
    dead = manager.revoke_key("zero", key.id)
    assert began + 40 <= dead <= time.time() + 40
    boot.seconds += 39.999
    assert asked(backbone, "zero", secret) == "zero"
    current = tmp_path / "toy/CURRENT"
    current.rename(tmp_path / "away")
    with pytest.raises(InvalidInput):
        backbone.refresh()
    boot.seconds += dead - began - 39.998
    with pytest.raises(Draining):
        asked(backbone, "zero", secret)
    (tmp_path / "away").rename(current)
    backbone.refresh()
    with pytest.raises(NoTenant):
        asked(backbone, "zero", secret)


def test_the_lease_ends_with_the_machine(tmp_path):
    seen = tmp_path / "SEEN"
    lease.save(seen, 12.5)
    assert lease.load(seen) == 12.5 and lease.load(tmp_path / "none") == float("-inf")
    seen.write_text(seen.read_text().replace(lease.BOOT.read_text().strip(), "another-start"))
    assert lease.load(seen) == float("-inf")
