"""A machine that the network cuts off without a word: packets are lost, and connections stay open."""

from contextlib import ExitStack

import pytest

from hplm.tenants.followed import Heard
from hplm.tenants.manager import Manager
from tests.cluster.hosts import network
from tests.cluster.router import require_haproxy, routing, tenant
from tests.cluster.stand_in import StandIn
from tests.follow.machine import Machine, same, step, until_whole
from tests.follow.nginx import TOKEN, nginx
from tests.places import knowledge, make_place
from tests.support.message import mentions
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

NAMES = [f"tenant-{number}" for number in range(20)]


@pytest.fixture
def hosts():
    with network() as hosts:
        yield hosts


def test_a_router_passes_by_a_replica_that_is_cut_off_and_comes_back_to_it(hosts, tmp_path):
    require_haproxy()
    with ExitStack() as closing:
        with hosts.far.inside():
            far = StandIn("far", hosts.far.address)
            closing.callback(far.close)
        closing.enter_context(hosts.near.inside())
        near = StandIn("near")
        closing.callback(near.close)
        router = closing.enter_context(routing(tmp_path, [near, far], [*map(tenant, NAMES), tenant("limited", rate=5.0)]))
        before = {name: router.replica_of(name) for name in [*NAMES, "limited"]}
        assert set(before.values()) == {"near", "far"}
        hosts.cut()
        router.until_up(but=("far",))
        assert {router.replica_of(name) for name in before} == {"near"}
        hosts.mend()
        router.until_up()
        assert {name: router.replica_of(name) for name in before} == before


def test_a_follower_that_is_cut_off_serves_on_says_since_when_and_catches_up(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr("hplm.follow.source.TIMEOUT", 1.0)  # seconds without a byte
    store, repository, state = make_place(tmp_path)
    live = Manager.open(repository, state)
    live.add("new-a", knowledge(store, "new-a"))
    with ExitStack() as closing:
        with hosts.near.inside():
            url = closing.enter_context(nginx(state, tmp_path / "nginx", host=hosts.near.address))
        closing.enter_context(hosts.far.inside())
        machine = Machine(repository, tmp_path / "copy", url, TOKEN)
        following = closing.enter_context(machine.following())
        until_whole(following)
        served, heard = machine.served(), Heard.load(machine.state.heard)
        hosts.cut()
        live.add("new-b", knowledge(store, "new-b"))
        live.delete("tenant-1")
        eventually(lambda: step(following) or any(mentions(line, url, "since") for line in machine.said))
        step(following)
        assert sum(mentions(line, url, "since") for line in machine.said) == 1
        assert machine.served().tenants == served.tenants
        assert Heard.load(machine.state.heard) == heard
        hosts.mend()
        until_whole(following)
        assert any("ended" in line for line in machine.said)
        assert same((repository, state), machine)
        again = Heard.load(machine.state.heard)
        assert heard is not None and again is not None and again.equal > heard.equal
