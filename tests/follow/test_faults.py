"""Faults of a source or a state are said once and clearly, and the copy goes on when they are mended."""

import contextlib
import json
import threading

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.adapters.bank import PAGE
from hplm.cli.main import main
from hplm.errors import Broken, InvalidInput
from hplm.follow.source import Source
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.followed import Followed
from hplm.tenants.manager import Manager
from testing.random_store import random_store, random_tenants
from testing.toy import CONFIG
from tests.follow.machine import Machine, same, step, until_whole
from tests.places import knowledge
from tests.support.message import mentioning, mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow


def changed(place):
    """Adds a tenant and deletes one."""
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    live.delete("tenant-1")
    return live


@contextlib.contextmanager
def trouble(machine, *named):
    """Follows into a trouble, which is said once, also to the doctor. In the block it is mended; then the copy goes on."""
    before = machine.served()
    with machine.following() as following:
        eventually(lambda: step(following) or any(mentions(line, *named) for line in machine.said))
        for _ in range(3):
            step(following)
        assert sum(mentions(line, *named) for line in machine.said) == 1
        assert Followed.load(machine.state.followed).trouble
        yield following
        until_whole(following)
        step(following)
        assert any("ended" in line for line in machine.said) and not Followed.load(machine.state.followed).trouble
    assert machine.served().tenants != before.tenants


def torn(path, content=None):
    """Returns a fault: something else comes instead of a file, or its first half."""

    def tear(answer):
        if answer.path == path:
            answer.body = answer.body[: len(answer.body) // 2] if content is None else content
            answer.length = len(answer.body)

    return tear


def with_status(status, where=""):
    return lambda answer: setattr(answer, "status", status if where in answer.path else answer.status)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (with_status(401), ["401", "--token-file"]),
        (with_status(500, "CURRENT"), ["500"]),
        (lambda answer: setattr(answer, "length", answer.length + 1), ["toy/CURRENT", "closed"]),
        (lambda answer: setattr(answer, "status", 200 if answer.status == 206 else answer.status), ["whole", "source.conf"]),
        *((torn("toy/snapshots/2", content), ["snapshots/2"]) for content in (None, b"[]", b"\xff\xfe\xff", b"{}")),
        *((torn("toy/CURRENT", content), ["toy/CURRENT"]) for content in (b"-3\n", b"<html>", b"12 13\n")),
    ],
)
def test_a_fault_of_the_source_is_said_once_and_nothing_of_it_is_served(place, source, machine, fault, named):
    changed(place)
    source.fault = fault
    with trouble(machine, *named):
        assert {tenant.id for tenant in machine.served().tenants} <= {"tenant-0", "tenant-1"}
        source.fault = lambda answer: None
    assert same(place[1:], machine)


def test_a_source_that_says_nothing(place, source, machine, monkeypatch):
    changed(place)
    monkeypatch.setattr("hplm.follow.source.TIMEOUT", 0.2)
    done = threading.Event()
    source.fault = lambda _: done.wait(PATIENCE)
    with trouble(machine, source.url, "timed out"):
        source.fault = lambda answer: None
        done.set()


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


def test_folders_that_are_no_copy_of_this_source_are_refused(place, source, machine, tmp_path):
    """Another follower's, a state of its own, the copy of another source, and one of another export."""
    _, repository, state = place
    changed(place)
    with machine.following(), pytest.raises(InvalidInput, match=mentioning(machine.state.folder)), machine.following():
        pass
    machine.follow()
    other = random_store(tmp_path / "another", CONFIG, random_tenants(2, 4, 3), corpus_tokens=2000, spread=0.3, seed=9)
    export(other, tmp_path / "elsewhere", ServingOptions())
    for strange, named in (
        (Machine(repository, state, source.url), [state / "toy", "--state"]),
        (Machine(repository, machine.root, "http://10.255.0.1:8090"), [source.url, "http://10.255.0.1:8090"]),
        (Machine(tmp_path / "elsewhere", machine.root, source.url), [machine.state.folder, "another export"]),
    ):
        with pytest.raises(InvalidInput, match=mentioning(*named)), strange.following():
            pass
    assert not (state / "toy/FOLLOWED").exists()
    strange = Machine(tmp_path / "elsewhere", tmp_path / "strange", source.url)
    with strange.following() as following, pytest.raises(InvalidInput, match=mentioning("another export", source.url)):
        following.copy.look()


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
    changed(place)
    machine.follow()
    for path in machine.state.banks.glob("*"):
        path.write_bytes(path.read_bytes()[:100])
    machine.follow()
    assert same(place[1:], machine)


@pytest.mark.parametrize(
    "address", ["10.0.0.1:80", "ftp://10.0.0.1", "http://", "http://a:99999", "http://user:word@a", "http://a/?b=c"]
)
def test_an_address_that_is_none(address):
    with pytest.raises(InvalidInput):
        Source(address)


def test_a_token_that_is_none():
    with pytest.raises(InvalidInput):
        Source("http://10.0.0.1", "two\nlines")


def test_a_copy_is_changed_at_its_source_alone(place, source, machine, capsys):
    store, repository, _ = place
    changed(place)
    machine.follow()
    live = Manager.open(repository, machine.root)
    commands = Commands(live, BackboneConfig.load(machine.folder / "backbone.json"))
    for change in (
        lambda: live.add("new-b", knowledge(store, "new-b")),
        lambda: live.roll_back("new-a"),
        lambda: live.delete("new-a"),
        lambda: live.add_key("new-a"),
        live.compact,
        lambda: live.delete_domain("law"),
        live.registry.audit,
        lambda: commands.run('{"command": "tenant.delete", "id": "new-a"}'),
    ):
        with pytest.raises(InvalidInput, match=mentioning(machine.url)):
            change()
    assert json.loads(commands.run('{"command": "tenant.show", "id": "new-a"}'))["version"] == 1
    places = ["--repository", str(repository), "--state", str(machine.root)]
    assert main(["verify", *places]) == 0
    assert main(["backup", "--to", str(machine.root / "x"), *places]) == 1
    assert mentions(capsys.readouterr().err, machine.url)
    assert not machine.state.registry.exists() and live.current().find("new-a")
