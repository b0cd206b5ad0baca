"""The copy of a registry on another machine: what it serves while the registry changes, is away, or is another one."""

import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from hplm.cli import serve
from hplm.errors import Broken, Draining, HplmError, InvalidInput, NoTenant
from hplm.location import location_of
from hplm.registry import lease
from hplm.registry.folder import Folder
from hplm.registry.opening import opened
from hplm.registry.pointer import begin
from hplm.registry.store import Absent, Away, Denied
from hplm.tenants.authorize import admit
from hplm.tenants.backup import back_up, restore
from hplm.tenants.directory import Directory
from hplm.tenants.manager import Manager
from hplm.tenants.mirror import Mirror
from hplm.tenants.snapshot import files_of
from hplm.tenants.state_folder import StateFolder
from testing.bucket import S3, bucket
from tests.support.faulty_folder import FaultyFolder
from tests.support.message import mentions, refusing
from tests.support.wait import PATIENCE, Clock, Hold, eventually
from tests.tenants.truth import Change, Export, expect_same, seen

pytestmark = pytest.mark.slow

KINDS = ("add", "update", "roll back", "delete", "add key", "revoke key", "limit")
DOMAINS = ("add domain", "delete domain", "update domain", "roll back domain")


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
        self.state = StateFolder(self.here / "toy")
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
            restore(far.folder / "backup", far.manager.registry, accept_old_keys=True)
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
    far.clock = Clock(1e6)
    far.restart()
    far.manager.add("two", far.export.knowledge[0])
    (record,) = (far.place / "toy/records").iterdir()
    right = record.read_bytes()
    record.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with refusing(Broken, record):
        far.mirror.look()
    with pytest.raises(NoTenant):
        far.backbone().view.snapshot.find("two")
    asked, left = lease.load(far.state.seen), far.here / "toy/arriving/law/1-gone"
    far.manager.add("three", far.export.knowledge[1])
    left.mkdir(parents=True)
    for _ in range(4):
        far.clock.seconds += 31
        with refusing(Broken, record):
            far.mirror.look()
    assert not left.exists()
    assert lease.load(far.state.seen) > asked and far.backbone().view.snapshot.find("three")  # it holds up nothing else
    fresh = Mirror(far.export.repository / "toy/1", far.store, StateFolder(far.folder / "fresh/toy"))
    fresh.begin()  # nor a new server
    fresh.close()
    record.write_bytes(right)
    far.manager.limit("three", rate=1.0)
    far.mirror.look()
    far.assert_same()


def test_an_interrupted_table_goes_on_with_the_file_where_it_stopped_and_leaves_the_disk_if_it_is_deleted(far):
    def cut(name):
        if name.startswith("plot"):
            fetched.append(name.rpartition("/")[2])
            if len(fetched) == 3:
                raise Away("cut off")

    def has_failed():
        with suppress(Away):
            far.mirror.raise_failure()
            return False
        return True

    far.clock = Clock(1e6)
    far.restart()
    for is_deleted in (True, False):
        fetched, far.store.fault = [], cut
        Change("add domain").make(far.manager, far.export)
        far.mirror.look()
        eventually(has_failed)
        assert list(far.here.rglob("law/1-*/*"))
        if is_deleted:
            far.manager.delete_domain("law")
            far.mirror.look()
            far.mirror.raise_failure()  # nothing is to come
            for _ in range(6):
                far.mirror.look()
                far.clock.seconds += 31
            assert not list(far.here.rglob("law/1-*"))
    far.restart()
    far.catch_up()
    far.assert_same()
    assert len(fetched) == len(set(fetched)) + 1  # one was asked for twice


def test_a_table_that_cannot_be_brought_holds_up_no_other_one(far):
    def fault(name):
        if name.startswith("plot/law"):
            raise Broken(f"{name} is not there")

    far.mirror.begin()
    far.store.fault = fault
    Change("add domain").make(far.manager, far.export)
    Change("update domain").make(far.manager, far.export)
    eventually(lambda: far.mirror.look() or list(far.here.rglob("plot/bio/2-*")))
    with pytest.raises(Broken):
        far.mirror.raise_failure()


def test_a_first_copy_is_whole_although_a_table_comes_while_it_is_made(far):
    asked, goes_on = threading.Event(), threading.Event()

    class Late(Mirror):
        def _has_tables(self, branch):
            """The table comes just after it was said that it is not here."""
            is_here = super()._has_tables(branch)
            if asked.is_set():
                goes_on.set()
                eventually(partial(super()._has_tables, branch))
            return is_here

    def fault(name):
        if name.startswith("plot"):
            asked.set()
            assert goes_on.wait(PATIENCE)

    far.store.fault = fault
    far.manager.add("two", far.export.knowledge[0])
    Change("add domain").make(far.manager, far.export)
    far.mirror = Late(far.export.repository / "toy/1", far.store, far.state)
    far.mirror.begin()
    far.assert_same()
    assert far.state.current() == 1, "something was served before all was here"


def test_one_process_copies_all_before_anything_is_served_and_another_goes_on_when_it_ends(far):
    far.manager.add("two", far.export.knowledge[0])
    Change("add domain").make(far.manager, far.export)
    boot = far.clock = Clock(1e6)
    far.restart()
    far.assert_same()
    far.manager.limit("two", rate=1.0)
    boot.seconds += 1
    pauses, patient = Hold(), Clock()
    patient.sleep, patient.clock_gettime = lambda seconds: pauses.pass_through(), boot.clock_gettime
    other = Mirror(far.export.repository / "toy/1", far.store, StateFolder(far.here / "toy"), patient)
    with ThreadPoolExecutor(1) as pool, pauses:
        beginning = pool.submit(other.begin)
        pauses.until_reached()  # it waits, because it would serve an old copy
        boot.seconds += 1
        far.mirror.look()
        pauses.open()
        beginning.result(PATIENCE)
    far.assert_same()
    Mirror(
        far.export.repository / "toy/1", far.store, StateFolder(far.here / "toy"), boot
    ).begin()  # where the registry is away
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
        far.mirror = Mirror(folder, far.store, StateFolder(tmp_path / "elsewhere/toy"))
    else:
        far.mirror.close()
        far.mirror = Mirror(far.export.repository / "toy/1", far.store, StateFolder(saved / "toy"))
    with pytest.raises(InvalidInput):
        far.mirror.look()
    if other in ("begun anew", "put back"):
        assert seen(far.backbone())[0]["two"].keys


def test_a_lost_registry_that_is_restored_is_copied_on(far):
    """Servers go on with their copies meanwhile, and none has to be stopped."""
    far.manager.add("two", far.export.knowledge[0])
    back_up(far.manager, far.folder / "backup")
    far.manager.add("three", far.export.knowledge[1])
    far.mirror.begin()
    reader = far.backbone()
    assert reader.generation == far.manager.registry.decided == 2
    shutil.rmtree(far.place / "toy")
    with pytest.raises(HplmError):
        far.mirror.look()
    restore(far.folder / "backup", far.manager.registry, accept_old_keys=True)
    far.catch_up()
    far.assert_same()
    reader.refresh()
    assert reader.view.snapshot.find("two")
    with pytest.raises(NoTenant):
        reader.view.snapshot.find("three")


@pytest.mark.parametrize("trouble", ["stopped", "denied"])
def test_a_server_starts_from_its_copy_while_the_bucket_is_away_or_refuses(
    export, tmp_path, monkeypatch, capsys, caplog, trouble
):
    monkeypatch.setenv("HPLM_MIRROR", str(tmp_path / "mirror"))
    with bucket() as server:
        place, boot = location_of("s3://bucket/far"), Clock(1e6)
        begin(opened(place / "toy"))
        manager = Manager.open(export.repository, place)
        secret, _ = manager.add_key("zero")
        no_copy = {"stopped": Away, "denied": Denied}[trouble]

        def cut_off():
            return server.stopped() if trouble == "stopped" else server.denying("GET")

        with cut_off(), pytest.raises(no_copy):
            serve.begin(export.repository, place, must_exist=False)
        backbone = export.read(place, clock=boot)
        backbone.mirror.close()
        with cut_off():
            serve.begin(export.repository, place, must_exist=False)
            assert mentions(capsys.readouterr().out, place, tmp_path / "mirror")
            backbone = export.read(place, clock=boot)
            assert asked(backbone, "zero", secret) == "zero" and mentions(caplog.text, place, tmp_path / "mirror")
            assert "zero" in {tenant.id for tenant in Directory(export.repository, place).snapshots()[0].tenants if tenant.keys}
            boot.seconds += 301
            with pytest.raises(Draining):  # readiness does not depend on the lease, and tenants without keys are answered
                asked(backbone, "zero", secret)
            assert asked(backbone, "one") == "one"
            backbone.mirror.close()


def asked(backbone, tenant, secret=""):
    """Returns the tenant, if the lookup of this backbone admits it."""
    parameters = {"tenant": tenant, "authorization": f"Bearer {secret}"}
    return admit(backbone.view.snapshot, parameters, 0.0, backbone.is_stale).id


@contextmanager
def without_current(server):
    """Here a registry in a folder has lost its `CURRENT`."""
    current = Path("here/toy/CURRENT").rename("away")
    yield
    current.rename("here/toy/CURRENT")


@pytest.mark.parametrize(
    ("where", "cut_off", "error"), [("s3://bucket/far", S3.stopped, Away), ("here", without_current, InvalidInput)]
)
def test_a_server_that_is_cut_off_refuses_keyed_tenants_from_when_revoke_says(
    export, tmp_path, monkeypatch, where, cut_off, error
):
    """It serves the others. A look that fails renews no lease."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPLM_MIRROR", str(tmp_path / "mirror"))
    with bucket() as server:
        place, boot = location_of(where), Clock(1e6)
        begin(opened(place / "toy"), lease_s=40.0)
        manager = Manager.open(export.repository, place)
        (secret, key), (other, _) = manager.add_key("zero"), manager.add_key("zero")
        backbone, began = export.read(place, clock=boot), time.time()
        dead = manager.revoke_key("zero", key.id)
        assert began + 40 <= dead <= time.time() + 40

        def look():
            if backbone.mirror is not None:
                backbone.mirror.look()
            backbone.refresh()

        with cut_off(server):
            boot.seconds += 39.999
            with pytest.raises(error):
                look()
            assert asked(backbone, "zero", secret) == "zero" and backbone.age > 38
            boot.seconds += dead - began - 39.998
            for given in (secret, other):
                with refusing(Draining, "registry"):
                    asked(backbone, "zero", given)
            with pytest.raises(NoTenant):  # an unknown key learns nothing
                asked(backbone, "zero", "wrong")
            assert asked(backbone, "one") == "one"
        assert backbone.generation == 2
        look()
        assert backbone.generation == manager.registry.decided == 3  # by the registry's count, also in a copy
        with pytest.raises(NoTenant):
            asked(backbone, "zero", secret)
        assert asked(backbone, "zero", other) == "zero"
        assert Directory(export.repository, place).snapshots()[0].find("zero").keys
        if backbone.mirror is not None:
            backbone.mirror.close()


def test_the_lease_ends_with_the_machine(tmp_path):
    seen = tmp_path / "SEEN"
    lease.save(seen, 12.5)
    assert lease.load(seen) == 12.5 and lease.load(tmp_path / "none") == float("-inf")
    seen.write_text(seen.read_text().replace(lease.BOOT.read_text().strip(), "another-start"))
    assert lease.load(seen) == float("-inf")
