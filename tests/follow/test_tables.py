"""Tables on their way: slow, cut off, damaged, no longer wanted. Conditions order what happens, never the clock."""

import threading

import pytest
import torch

from hplm.follow import tables
from hplm.tenants.manager import Manager
from tests.follow.machine import same, step, until_whole
from tests.follow.test_following import add_law
from tests.places import answer, knowledge
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow
VALUES = "toy/plot/law/1/values"


class Throttle:
    """Sends half of a table, and the rest when the test says so."""

    def __init__(self, source, path=VALUES):
        self.travels, self.may_go_on = threading.Event(), threading.Event()
        self._path = path
        source.fault = self

    def __call__(self, answer):
        if answer.path == self._path:
            answer.pieces = lambda: self._sent(answer.body)

    def _sent(self, body):
        yield body[: len(body) // 2]
        self.travels.set()
        self.may_go_on.wait(PATIENCE)
        yield body[len(body) // 2 :]


@pytest.fixture
def throttle(source):
    throttle = Throttle(source)
    yield throttle
    throttle.may_go_on.set()


def test_keys_are_revoked_and_tenants_deleted_while_a_table_travels(place, machine, throttle):
    store, repository, state = place
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    _, key = live.add_key("tenant-0")
    _, second = live.add_key("tenant-0")
    machine.follow()
    add_law(place, live)
    live.revoke_key("tenant-0", key.id)
    live.limit("tenant-0", rate=2.0)
    live.delete("tenant-1")
    live.add("new-b", knowledge(store, "new-b"))
    newest = live.current().generation
    with machine.following() as following:
        eventually(lambda: step(following) or throttle.travels.is_set())
        eventually(lambda: step(following) or following.copy.reached.removed == newest)
        eventually(lambda: step(following) or "new-b" in {tenant.id for tenant in machine.served().tenants})
        served = machine.served()
        assert {tenant.id for tenant in served.tenants} == {"tenant-0", "new-a", "new-b"}
        assert served.find("tenant-0").keys == (second,) and served.find("tenant-0").rate == 2.0
        assert [branch.domain for branch in served.branches] == ["root"]
        assert torch.equal(machine.answer("new-b"), answer(place, "new-b"))
        assert not following.copy.is_whole and following.copy.reached.whole < newest
        report = state / "toy/readers/one"
        eventually(lambda: step(following) or report.read_text().split()[1] == str(newest))
        assert live.settle(newest, removes=True) == []
        throttle.may_go_on.set()
        until_whole(following)
    assert same((repository, state), machine)


def test_a_table_that_is_cut_off_goes_on_where_it_stopped(place, source, machine):
    _, repository, state = place
    add_law(place, Manager.open(repository, state))

    def cut_off_once(answer):
        if answer.path == VALUES and answer.length == len(answer.body) and not cuts:
            cuts.append(len(answer.body))
            answer.body = answer.body[: len(answer.body) // 2]

    cuts = []
    source.fault = cut_off_once
    machine.follow()
    ranges = [asked for asked in source.asked if asked.startswith(f"GET /{VALUES}")]
    assert len(ranges) == 2 and ranges[1] == f"GET /{VALUES} bytes={cuts[0] // 2}-{cuts[0] - 1}"
    assert same((repository, state), machine)
    assert any(mentions(line, "law/1", "closed") for line in machine.said)


@pytest.mark.parametrize("file", ["values", "checksums", "rows"])
def test_a_damaged_table_is_never_served_and_brought_again(place, source, machine, file):
    store, repository, state = place
    live = Manager.open(repository, state)
    add_law(place, live)
    live.add("new-a", knowledge(store, "new-a"))

    def damage(answer):
        if answer.path == f"toy/plot/law/1/{file}":
            answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])

    source.fault = damage
    with machine.following() as following:
        eventually(lambda: step(following) or any(mentions(line, "law/1") and "damaged" in line for line in machine.said))
        eventually(lambda: step(following) or following.copy.reached.removed == live.current().generation)
        eventually(lambda: step(following) or "new-a" in {tenant.id for tenant in machine.served().tenants})
        assert "lawyer" not in {tenant.id for tenant in machine.served().tenants}
        assert sum("damaged" in line for line in machine.said) == 1, "it is said once"
        source.fault = lambda answer: None
        until_whole(following)
    assert same((repository, state), machine) and any(mentions(line, "law/1", "ended") for line in machine.said)


def test_a_table_that_was_deleted_meanwhile_does_not_arrive(place, machine, throttle):
    _, repository, state = place
    live = Manager.open(repository, state)
    add_law(place, live)
    with machine.following() as following:
        eventually(lambda: step(following) or throttle.travels.is_set())
        live.delete("lawyer")
        live.delete_domain("law")
        until_whole(following)
        throttle.may_go_on.set()
        eventually(lambda: step(following) or not list(machine.state.folder.glob("arriving/*")))
    assert same((repository, state), machine) and not (machine.state.tables / "law").exists()


def test_a_table_that_does_not_fit_on_the_disk_holds_up_nothing_else(place, source, machine, monkeypatch):
    _, repository, state = place
    live = Manager.open(repository, state)
    add_law(place, live)
    live.delete("tenant-1")
    monkeypatch.setattr(tables, "FREE_BYTES", 1 << 60)
    with machine.following() as following:
        eventually(lambda: step(following) or any(mentions(line, "law/1", "disk") for line in machine.said))
        assert "tenant-1" not in {tenant.id for tenant in machine.served().tenants}
        assert not any(asked.startswith(f"GET /{VALUES}") for asked in source.asked)
        monkeypatch.setattr(tables, "FREE_BYTES", 0)
        until_whole(following)
    assert same((repository, state), machine)
