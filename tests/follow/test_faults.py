"""Faults of a source, a disk or a state are said once and clearly, and the copy goes on when they are mended."""

import contextlib
import errno
import threading

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.adapters.bank import PAGE
from hplm.errors import Broken, InvalidInput
from hplm.follow import records
from hplm.follow.source import Source
from hplm.tenants.followed import Followed
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from testing.random_store import random_store, random_tenants
from testing.toy import CONFIG
from tests.follow.machine import Machine, same, step, until_whole
from tests.follow.nginx import TOKEN, free_port, nginx
from tests.places import knowledge
from tests.support.message import mentioning, mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("hplm.follow.records.LATER", 0.01)


def changed(place):
    """Adds a tenant and deletes one."""
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    live.delete("tenant-1")
    return live


@contextlib.contextmanager
def trouble(machine, *named):
    """Follows into a trouble, which is said once. In the block it is mended; then the copy goes on."""
    before = machine.served()
    with machine.following() as following:
        eventually(lambda: step(following) or any(mentions(line, *named) for line in machine.said))
        for _ in range(3):
            step(following)
        assert sum(mentions(line, *named) for line in machine.said) == 1
        yield following
        until_whole(following)
        assert any("ended" in line for line in machine.said)
    assert machine.served().tenants != before.tenants


def test_a_wrong_token(place, tmp_path):
    _, repository, state = place
    changed(place)
    with nginx(state, tmp_path / "nginx") as url:
        machine = Machine(repository, tmp_path / "copy", url, "wrong")
        with trouble(machine, "401", "--token-file") as following:
            assert machine.served().generation == 0
            following.copy._source._headers["Authorization"] = f"Bearer {TOKEN}"
        assert same((repository, state), machine)


def test_a_source_that_is_away_and_comes_back_is_followed_again(place, tmp_path):
    _, repository, state = place
    state.mkdir()
    port = free_port()
    with nginx(state, tmp_path / "nginx", port) as url:
        machine = Machine(repository, tmp_path / "copy", url, TOKEN)
        machine.follow()
    changed(place)
    with contextlib.ExitStack() as again, trouble(machine, url, "Connection refused", "since"):
        assert machine.served().find("tenant-1")
        again.enter_context(nginx(state, tmp_path / "nginx", port))
    assert same((repository, state), machine)


def test_a_source_that_closes_connections(place, source, machine):
    changed(place)
    source.fault = lambda answer: setattr(answer, "length", answer.length + 1)
    with trouble(machine, source.url, "toy/CURRENT", "closed"):
        source.fault = lambda answer: None


def test_a_source_that_says_nothing(place, source, machine, monkeypatch):
    changed(place)
    monkeypatch.setattr("hplm.follow.source.TIMEOUT", 0.2)
    done = threading.Event()
    source.fault = lambda _: done.wait(PATIENCE)
    with trouble(machine, source.url, "timed out"):
        source.fault = lambda answer: None
        done.set()


def test_the_source_of_another_export(place, source, machine, tmp_path):
    changed(place)
    other = random_store(tmp_path / "another", CONFIG, random_tenants(2, 4, 3), corpus_tokens=2000, spread=0.3, seed=9)
    export(other, tmp_path / "elsewhere", ServingOptions())
    strange = Machine(tmp_path / "elsewhere", tmp_path / "strange", source.url)
    with strange.following() as following, pytest.raises(InvalidInput, match=mentioning("another export", source.url)):
        following.copy.look()
    machine.follow()
    mixed = Machine(tmp_path / "elsewhere", machine.root, source.url)
    with pytest.raises(InvalidInput, match=mentioning(machine.state.folder, "another export")), mixed.following():
        pass


@pytest.mark.parametrize(
    ("path", "torn", "named"),
    [
        *(("toy/snapshots/2", torn, ["snapshots/2"]) for torn in (None, b"[]", b"\xff\xfe\xff", b"{}")),
        *(("toy/CURRENT", torn, ["toy/CURRENT", "generation"]) for torn in (b"-3\n", b"<html>", b"12 13\n")),
    ],
)
def test_a_torn_file(place, source, machine, path, torn, named):
    """`torn`: what comes instead, or the first half."""
    changed(place)

    def tear(answer):
        if answer.path == path:
            answer.body = answer.body[: len(answer.body) // 2] if torn is None else torn
            answer.length = len(answer.body)

    source.fault = tear
    with trouble(machine, *named):
        assert machine.served().generation == 0
        source.fault = lambda answer: None
    assert same(place[1:], machine)


@pytest.mark.parametrize("place_of_damage", ["weights", "owner", "page"])
def test_a_damaged_record_holds_up_only_its_tenant(place, source, machine, place_of_damage):
    store, repository, state = place
    live = Manager.open(repository, state)
    machine.follow()
    for name in ("new-a", "new-b"):
        live.add(name, knowledge(store, name))
    live.delete("tenant-1")
    bank = live.current().find("new-a").adapter.bank.removeprefix("state/")

    def damage(answer):
        if answer.path == f"toy/adapters/{bank}":
            at = {"weights": 100, "owner": 0, "page": 3}[place_of_damage]
            if (len(answer.body) == PAGE) == (place_of_damage == "page"):
                answer.body = answer.body[:at] + bytes([answer.body[at] ^ 1]) + answer.body[at + 1 :]

    source.fault = damage
    with trouble(machine, bank):
        there = {tenant.id for tenant in machine.served().tenants}
        assert "new-a" not in there and "tenant-1" not in there
        assert ("new-b" in there) == (place_of_damage != "page")
        source.fault = lambda answer: None
    assert same((repository, state), machine)


def test_a_place_that_has_another_record_by_now_is_no_trouble(place, source, machine):
    """The source compacts and reuses places between the snapshot and the records."""
    store, repository, state = place
    live = changed(place)
    done = []

    def compact_first(answer):
        if answer.path.startswith("toy/adapters") and not done:
            done.append(live.add("new-b", knowledge(store, "new-b")))
            live.delete("new-a")
            live.compact()
            fresh = source.answer(answer.path, None)
            answer.status, answer.body, answer.length = fresh.status, fresh.body, fresh.length

    source.fault = compact_first
    with machine.following() as following:
        until_whole(following)
    assert done and same((repository, state), machine)
    assert not any("since" in line for line in machine.said)


def test_a_source_without_ranges(place, source, machine):
    changed(place)

    def whole(answer):
        if answer.status == 206:
            answer.status = 200

    source.fault = whole
    with trouble(machine, "whole", "deploy/nginx/source.conf"):
        source.fault = lambda answer: None


@pytest.mark.parametrize("owner, moment", [(records, "write_packed"), (records, "write_bank"), (Snapshot, "save")])
def test_a_full_disk(place, source, machine, monkeypatch, owner, moment):
    changed(place)
    with monkeypatch.context() as full:
        full.setattr(owner, moment, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with trouble(machine, "No space left on device"):
            there = {tenant.id for tenant in machine.served().tenants}
            assert ("tenant-1" in there) == (owner is Snapshot), "a deletion needs no record"
            full.undo()
    assert same(place[1:], machine)


def test_a_second_follower_of_the_same_copy_is_refused(place, machine):
    with machine.following(), pytest.raises(InvalidInput, match=mentioning(machine.state.folder)), machine.following():
        pass
    machine.follow()


def test_a_state_that_is_no_copy_is_not_overwritten(place, source, tmp_path):
    changed(place)
    machine = Machine(place[1], place[2], source.url)
    with pytest.raises(InvalidInput, match=mentioning(place[2] / "toy", "--state")), machine.following():
        pass
    assert not (place[2] / "toy/FOLLOWED").exists()


def test_a_copy_of_another_source_is_refused(place, source, machine):
    machine.follow()
    elsewhere = Machine(place[1], machine.root, "http://10.255.0.1:8090")
    with pytest.raises(InvalidInput, match=mentioning(source.url, "http://10.255.0.1:8090")), elsewhere.following():
        pass


def test_a_snapshot_that_names_files_elsewhere_is_refused(place, source, machine):
    changed(place)

    def mislead(answer):
        if answer.path.startswith("toy/snapshots"):
            answer.body = answer.body.replace(b'"domain": "root"', b'"domain": "../../x"')
            answer.length = len(answer.body)

    source.fault = mislead
    with machine.following() as following, pytest.raises(Broken, match=mentioning("snapshots/2")):
        following.copy.look()


def test_records_that_are_damaged_here_are_brought_again(place, source, machine):
    _, repository, state = place
    changed(place)
    machine.follow()
    for path in machine.state.banks.glob("*"):
        path.write_bytes(path.read_bytes()[:100])
    machine.follow()
    assert same((repository, state), machine)


def test_the_trouble_is_in_the_state_for_the_doctor(place, source, machine):
    changed(place)
    source.fault = lambda answer: setattr(answer, "status", 500)
    with machine.following() as following:
        step(following)
        found = Followed.load(machine.state.followed)
        assert mentions(found.trouble, "500") and found.since > 0
        source.fault = lambda answer: None
        until_whole(following)
        step(following)
        assert Followed.load(machine.state.followed).trouble == ""


@pytest.mark.parametrize(
    "address", ["10.0.0.1:80", "ftp://10.0.0.1", "http://", "http://a:99999", "http://user:word@a", "http://a/?b=c"]
)
def test_an_address_that_is_none(address):
    with pytest.raises(InvalidInput):
        Source(address)


def test_a_token_that_is_none():
    with pytest.raises(InvalidInput):
        Source("http://10.0.0.1", "two\nlines")
