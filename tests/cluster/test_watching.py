"""The maps of a running HAProxy follow the snapshots."""

import pytest

from hplm.cluster.description import ClusterDescription
from hplm.cluster.watching import Served as Followed
from hplm.cluster.watching import Watcher
from hplm.errors import HplmError
from hplm.tenants.state import State
from tests.cluster.router import Router, Served, require_haproxy, stand_ins, tenant

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
    require_haproxy()
    served = {
        "first": Served(tmp_path, "first", [OPEN]),
        "second": Served(tmp_path, "second", [tenant("other")], models=("second",)),
    }
    with stand_ins(2, "first-") as first, stand_ins(1, "second-") as second:
        router = Router(tmp_path, {"first": first, "second": second}, served)
        try:
            assert router.write() == 0
            router.start()
            router.until_up("first")
            router.until_up("second")
            yield Watched(router, served)
        finally:
            router.close()


def test_a_tenant_that_is_added_changed_moved_and_deleted(watched):
    assert watched.maps() == [{"other": "second"}, {}]
    watched.served["second"].publish([tenant("other"), tenant("new", in_flight=1)])
    assert watched.maps() == [{"other": "second", "new": "second"}, {"new": "1/1"}]
    assert watched.router.replica_of("new") == "second-1"
    watched.served["first"].publish([LIMITED])
    homes = watched.maps()[1]
    assert set(homes) == {"acme", "new"}
    home = f"first-{homes['acme'].split('/')[1]}"
    assert watched.router.replica_of("acme") == home
    watched.served["first"].publish([tenant("acme", rate=5.0, homes=2)])
    assert watched.maps()[1]["acme"].startswith("2/")
    assert {watched.router.replica_of("acme") for _ in range(40)} == {"first-1", "first-2"}
    watched.served["second"].publish([])
    assert watched.maps()[0] == {}
    assert watched.router.replica_of("new").startswith("first-"), "where a server answers that there is no such tenant"


def taken(served):
    """Returns the generations that the readers of a pool's state have taken."""
    state = State(served.state / "toy")
    return [reader.whole for reader in state.taken(state.clock())]


def test_commands_wait_until_haproxy_has_a_change(watched):
    first = watched.served["first"]
    watched.maps()
    assert taken(first) == [0]
    first.publish([LIMITED])
    assert taken(first) == [0]
    watched.maps()
    assert taken(first) == [1]
    watched.watcher.close()
    assert taken(first) == [], "nobody waits for a watcher that has ended"


def test_commands_do_not_wait_while_no_haproxy_runs(watched):
    first = watched.served["first"]
    watched.maps()
    watched.router.stop()
    watched.watcher.look()
    assert taken(first) == [], "no HAProxy routes by older routes"
    watched.router.start()
    watched.maps()
    assert taken(first) == [0], "the same generation as before is said at once"
    watched.router.stop()
    first.publish([LIMITED])
    watched.watcher.look()
    assert taken(first) == []
    watched.router.start()
    watched.maps()
    assert taken(first) == [1]


def hangs(*_):
    raise TimeoutError("timed out")


def refuses(*_):
    raise HplmError("it has no such map")


@pytest.mark.parametrize("starts, call, broken", [(False, "socket.socket.recv", hangs), (True, "AdminSocket.set_map", refuses)])
def test_a_haproxy_that_does_not_take_a_change_is_waited_for(watched, monkeypatch, starts, call, broken):
    """Nobody knows what it routes by, whether it has been running or has just started."""
    first = watched.served["first"]
    watched.maps()
    if starts:
        watched.router.stop()
        watched.watcher.look()
        watched.router.start()
    with monkeypatch.context() as fault:
        fault.setattr(f"hplm.cluster.admin_socket.{call}", broken)
        first.publish([LIMITED])
        watched.watcher.look()
        assert taken(first) == [0]
    watched.maps()
    assert taken(first) == [1]


def test_a_watcher_that_may_not_write_into_a_state_says_so_once_and_goes_on(watched, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hplm.tenants.state.Reader.say", refuse)
    watched.maps()
    said = [line for line in watched.said if "Permission denied" in line]
    assert len(said) == 2, "of two states"
    watched.served["first"].publish([LIMITED])
    assert "acme" in watched.maps()[1]
    assert [line for line in watched.said if "Permission denied" in line] == said


def test_many_changes_at_once(watched):
    names = [f"tenant-{number:04}" for number in range(2000)]
    watched.served["second"].publish([tenant(name, rate=1.0) for name in names])
    pools, homes = watched.maps()
    assert pools == dict.fromkeys(names, "second") and homes == dict.fromkeys(names, "1/1")
    watched.served["second"].publish([])
    assert watched.maps() == [{}, {}]


def test_a_haproxy_that_is_away_is_said_once_and_has_all_when_it_is_back(watched):
    watched.maps()
    watched.router.stop()
    watched.served["first"].publish([LIMITED])
    said = len(watched.said)
    watched.watcher.look()
    watched.watcher.look()
    (problem,) = [line for line in watched.said[said:] if "haproxy.sock" in line]
    watched.served["second"].publish([tenant("other"), tenant("new")])
    watched.watcher.look()
    assert watched.said.count(problem) == 1
    watched.router.start()
    assert watched.router.socket.read_map(watched.router.to / "pools.map") == {"other": "second", "new": "second"}, "its files"
    assert watched.maps() == [{"other": "second", "new": "second"}, watched.maps()[1]]
    assert "acme" in watched.maps()[1]


def test_a_haproxy_that_started_with_older_files_is_brought_up_to_date(watched):
    watched.served["first"].publish([LIMITED])
    newest = watched.maps()
    files = {name: (watched.router.to / name).read_text() for name in ("pools.map", "homes.map")}
    watched.router.stop()
    for name in files:
        (watched.router.to / name).write_text("strange 1/1\n")
    watched.router.start()
    for name, content in files.items():
        (watched.router.to / name).write_text(content)
    assert watched.maps() == newest


def test_a_reload_and_another_program_at_the_socket_are_survived(watched):
    watched.maps()
    socket = watched.router.to / "haproxy.sock"
    aside = socket.rename(socket.with_suffix(".aside"))
    socket.write_text("no socket")
    watched.served["first"].publish([LIMITED])
    watched.watcher.look()
    assert str(socket) in watched.said[-1]
    aside.rename(socket)
    assert "acme" in watched.maps()[1]
    watched.router.reload()
    watched.served["first"].publish([OPEN])
    assert watched.maps()[1] == {}


def test_a_state_of_another_export_is_said_and_the_last_one_stays(watched, caplog):
    watched.served["first"].publish([LIMITED])
    before = watched.maps()
    watched.served["first"].publish([OPEN], export="another")
    assert watched.maps() == watched.maps() == before
    assert len([line for line in caplog.messages if "another export" in line]) == 1
    watched.served["first"].publish([OPEN])
    assert watched.maps()[1] == {}


def test_a_tenant_that_comes_into_a_second_pool_stays_in_the_first(watched):
    watched.maps()
    watched.served["second"].publish([tenant("other"), OPEN, tenant("new")])
    assert watched.maps()[0] == {"other": "second", "new": "second"}
    watched.watcher.look()
    assert len([line for line in watched.said if "'acme'" in line]) == 1
