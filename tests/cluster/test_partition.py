"""A machine that the network cuts off without a word: packets are lost, and connections stay open."""

from contextlib import ExitStack

import pytest

from tests.cluster.fake_server import FakeServer
from tests.cluster.hosts import network
from tests.cluster.router import require_haproxy, routing, tenant

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
            far = FakeServer("far", hosts.far.address)
            closing.callback(far.close)
        closing.enter_context(hosts.near.inside())
        near = FakeServer("near")
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
