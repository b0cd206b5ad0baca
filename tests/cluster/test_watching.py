"""The maps of a running HAProxy follow the snapshots."""

import socket

import pytest

from hplm.cluster.description import ClusterDescription
from hplm.cluster.router import SOCKET
from hplm.cluster.watching import Served as Followed
from hplm.cluster.watching import Watcher
from hplm.tenants.state import State
from tests.cluster.router import Router, Served, fake_servers, started, tenant

pytestmark = pytest.mark.slow

OPEN, LIMITED = tenant("acme"), tenant("acme", rate=5.0)


class Watched:
    """A router of two pools, and a watcher that looks when it is told to."""

    def __init__(self, router, served):
        self.router, self.served, self.said = router, served, []
        self.watcher = Watcher(Followed(ClusterDescription.read(self.router.cluster)), self.router.to, self.said.append)

    def maps(self):
        """Returns what HAProxy has, which the files must have too."""
        self.watcher.look()
        found = []
        for name in ("pools.map", "homes.map"):
            file = self.router.to / name
            found.append(self.router.socket.read_map(file))
            assert found[-1] == dict(line.split() for line in file.read_text().splitlines())
        return found


@pytest.fixture
def watched(tmp_path):
    served = {
        "first": Served(tmp_path, "first", [OPEN]),
        "second": Served(tmp_path, "second", [tenant("other")], models=("second",)),
    }
    with (
        fake_servers(2, "first-") as first,
        fake_servers(1, "second-") as second,
        started(Router(tmp_path, {"first": first, "second": second}, served)) as router,
    ):
        yield Watched(router, served)


def test_a_tenant_that_is_added_changed_moved_and_deleted(watched):
    first, second = watched.served["first"], watched.served["second"]
    assert watched.maps() == [{"other": "second"}, {}]
    second.publish([tenant("other"), tenant("new", in_flight=1)])
    assert watched.maps() == [{"other": "second", "new": "second"}, {"new": "1/1"}]
    assert watched.router.replica_of("new") == "second-1"
    first.publish([LIMITED])
    homes = watched.maps()[1]
    assert set(homes) == {"acme", "new"}
    assert watched.router.replica_of("acme") == f"first-{homes['acme'].split('/')[1]}"
    first.publish([tenant("acme", rate=5.0, homes=2)])
    assert watched.maps()[1]["acme"].startswith("2/")
    assert {watched.router.replica_of("acme") for _ in range(40)} == {"first-1", "first-2"}
    second.publish([])
    assert watched.maps()[0] == {}
    assert watched.router.replica_of("new").startswith("first-"), "where a server answers that there is no such tenant"
    second.publish([OPEN, tenant("new")])
    assert watched.maps()[0] == {"new": "second"}, "who comes into a second pool stays in the first"
    assert len([line for line in watched.said if "'acme'" in line]) == 1
    names = [f"tenant-{number:04}" for number in range(2000)]
    second.publish([tenant(name, rate=1.0) for name in names])
    pools, homes = watched.maps()
    assert pools == dict.fromkeys(names, "second") and {name: homes[name] for name in names} == dict.fromkeys(names, "1/1")


def taken(served):
    """Returns the generations that the readers of a pool's state have taken."""
    state = State(served.state / "toy")
    return [reader.generation for reader in state.taken(state.clock())]


def test_commands_wait_until_haproxy_has_a_change_if_one_runs_and_it_gets_all_when_it_is_back(watched):
    first, router = watched.served["first"], watched.router
    watched.maps()
    first.publish([LIMITED])
    assert taken(first) == [0]
    control = router.to / SOCKET
    control.rename(router.to / "away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(control))
        watched.watcher.look()
        assert taken(first) == [0], "it runs, and has not taken the change"
    (router.to / "away").replace(control)
    watched.maps()
    assert taken(first) == [1]
    router.stop()
    first.publish([OPEN])
    said = len(watched.said)
    for _ in range(2):
        watched.watcher.look()
    assert len([line for line in watched.said[said:] if "haproxy.sock" in line]) == 1, "it is said once"
    assert taken(first) == [], "no HAProxy routes by older routes"
    homes = router.to / "homes.map"
    for begin in (router.start, router.reload):
        newest = homes.read_text()
        homes.write_text("strange 1/1\n")  # it begins with an older file
        begin()
        homes.write_text(newest)
        assert watched.maps()[1] == {} and taken(first) == [2]
    first.publish([LIMITED])
    assert set(watched.maps()[1]) == {"acme"} and taken(first) == [3]
    watched.watcher.close()
    assert taken(first) == [], "nobody waits for a watcher that has ended"
