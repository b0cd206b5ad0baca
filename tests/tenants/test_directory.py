"""The directory finds a tenant's backbone while tenants are added, moved and deleted."""

import shutil
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from hplm.errors import InvalidInput, NoTenant
from hplm.registry import follower
from hplm.registry.folder import Folder
from hplm.registry.follower import LONGEST_PAUSE
from hplm.registry.pointer import begin
from hplm.tenants.directory import Directory
from hplm.tenants.keys import new_key
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from tests.support.message import mentions, refusing
from tests.support.wait import Clock, Hold, eventually

pytestmark = pytest.mark.slow

NOW = 1_000_000.0


class Served:
    """A repository of two backbones, and their managers."""

    def __init__(self, folder, toy):
        self.repository, self.state, self.clock = folder / "repository", folder / "state", Clock()
        exported = Snapshot.load(toy.folder / "tenants.json")
        self.acme = exported.find("acme")
        for name, ids in (("one", "acme beta"), ("two", "city dune")):
            (self.repository / name / "1").mkdir(parents=True)
            tenants = [tenant for tenant in exported.tenants if tenant.id in ids.split()]
            Snapshot(0, exported.branches, tenants, name).save(self.repository / name / "1" / "tenants.json")
            begin(Folder(self.state / name))
        (self.repository / "one-lookup/1").mkdir(parents=True)

    def directory(self):
        return Directory(self.repository, self.state, self.clock)

    def registry(self, name):
        return Manager(self.repository / name / "1", self.state).registry

    def publish(self, name, *tenants):
        """Lets the backbone serve these tenants and no others."""

        def edit(change):
            change.tenants = {tenant.id: tenant for tenant in tenants}

        self.registry(name).change("a test", edit)


@pytest.fixture
def served(tmp_path, toy):
    return Served(tmp_path, toy)


def look(directory):
    """Lets it look once, as its threads do."""
    for looking in directory._looking:
        looking.look()


def _place(directory, tenant, **parameters):
    return directory.find({"tenant": tenant, **parameters}, NOW)[0]


def test_exported_tenants_are_found_in_their_backbone(served):
    for directory in (served.directory(), Directory(served.repository)):
        assert [_place(directory, tenant) for tenant in ("acme", "beta", "city", "dune")] == ["one", "one", "two", "two"]
        for stranger in (None, "nobody", "one", 7):
            with pytest.raises(InvalidInput if stranger == 7 else NoTenant):
                _place(directory, stranger)


def test_added_and_moved_tenants_are_found_when_it_has_looked(served):
    directory = served.directory()
    served.publish("two", replace(served.acme, id="newcomer"))
    with pytest.raises(NoTenant):
        _place(directory, "newcomer")
    look(directory)
    assert _place(directory, "newcomer") == "two"
    served.publish("one")
    served.publish("two", served.acme)
    assert _place(directory, "acme") == "one"  # that backbone will answer 404
    look(directory)
    assert _place(directory, "acme") == "two"
    with pytest.raises(NoTenant):
        _place(directory, "city")


def test_requests_read_no_files_and_a_state_that_hangs_holds_up_nobody(served, monkeypatch):
    """Names that nobody knows cost nothing, and changes of other backbones are seen."""
    hold, asked, get = Hold(), [], Folder.get

    def hangs(folder, name):
        asked.append(threading.get_ident())
        if folder.path.name == "one":
            hold.pass_through()
        return get(folder, name)

    monkeypatch.setattr(follower, "ENDING_SECONDS", 0.1)
    directory = served.directory()
    monkeypatch.setattr(Folder, "get", hangs)
    with closing(directory), hold:
        directory.follow()
        hold.until_reached()
        served.publish("two", replace(served.acme, id="newcomer"))
        eventually(lambda: "newcomer" in {tenant.id for tenant in directory.snapshots()[1].tenants})
        asked.clear()
        for _ in range(100):
            with pytest.raises(NoTenant):
                _place(directory, "nobody")
            assert (_place(directory, "acme"), _place(directory, "newcomer")) == ("one", "two")
        assert threading.get_ident() not in asked


def test_changes_wait_until_it_has_taken_them(served):
    """So a new tenant is found as soon as the command that adds it has ended."""
    with closing(served.directory()) as directory:
        directory.follow()
        manager = Manager(served.repository / "one/1", served.state)
        eventually(lambda: manager.state.taken(manager.state.clock()))
        manager.delete("beta")
        assert manager.settle() == []
        with pytest.raises(NoTenant):
            _place(directory, "beta")


def test_of_two_tenants_with_one_name_the_key_decides(served):
    (mine, my_key), (theirs, their_key) = new_key(), new_key()
    served.publish("one", replace(served.acme, keys=(my_key,)))
    served.publish("two", replace(served.acme, keys=(their_key,)))
    directory = served.directory()
    assert _place(directory, "acme", Authorization=f"Bearer {mine}") == "one"
    assert _place(directory, "acme", authorization=f"Bearer {theirs}") == "two"
    with pytest.raises(NoTenant):
        _place(directory, "acme")
    served.publish("two", replace(served.acme, keys=(my_key, their_key)))
    look(directory)
    with refusing(InvalidInput, "'acme'", "'one'", "'two'"):
        _place(directory, "acme", authorization=f"Bearer {mine}")
    with pytest.raises(NoTenant):
        _place(directory, "acme", authorization="Bearer neither")


def test_if_a_snapshot_cannot_be_read_or_is_of_another_export_the_last_one_stays(served, caplog):
    directory = served.directory()
    served.publish("two", served.acme)
    (snapshot,) = (served.state / "two/snapshots").iterdir()
    snapshot.write_text("{")
    for _ in range(3):
        served.clock.seconds += LONGEST_PAUSE
        look(directory)
        assert _place(directory, "city") == "two"
    assert len([record for record in caplog.records if mentions(record.message, snapshot)]) == 1
    registry = served.registry("one")
    registry.exported = Snapshot(0, registry.exported.branches, [served.acme], "older")
    registry.change("a test", lambda change: None)
    for _ in range(2):
        served.clock.seconds += LONGEST_PAUSE
        look(directory)
        assert _place(directory, "beta") == "one", "a state of another export is served"
    assert len([record for record in caplog.records if mentions(record.message, served.state / "one")]) == 1
    with refusing(InvalidInput, served.state / "one"):
        served.directory()
    for name in ("one", "two"):
        shutil.rmtree(served.state / name)
        begin(Folder(served.state / name))
    for _ in range(2):
        served.publish("two", served.acme)
    served.publish("one")
    look(directory)
    assert _place(directory, "acme") == "two"
