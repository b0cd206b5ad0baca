"""`hplm route`: what it writes and refuses, and how with --watch the maps of a running HAProxy follow the snapshots."""

import json
import socket
import subprocess

import pytest

from hplm.cli.main import main
from hplm.cluster.description import read_pools
from hplm.cluster.router import LONGEST_SOCKET, SOCKET, start_command
from hplm.cluster.watching import Served as Followed
from hplm.cluster.watching import Watcher
from hplm.errors import HplmError
from hplm.server.process import IN_PYTHON_PACKAGES, program
from hplm.tenants.state import State
from tests.cluster.router import Router, Served, fake_servers, started, tenant
from tests.support.message import mentions, refusing

DECODER = 'name: "writer"\nmodel_transaction_policy { decoupled: true }\n'
OPEN, LIMITED = tenant("acme"), tenant("acme", rate=5.0)


@pytest.fixture
def replicas():
    with fake_servers(2) as replicas:
        yield replicas


@pytest.fixture
def router(tmp_path, replicas):
    router = Router(tmp_path, {"all": replicas}, {"all": Served(tmp_path, "all", [tenant("acme", rate=5.0), tenant("beta")])})
    yield router
    router.close()


@pytest.fixture
def refused(router, capsys):
    def refused(*named, more=()):
        assert main([*router.arguments, *map(str, more)]) == 1
        assert mentions(said := capsys.readouterr().err, *named), said

    return refused


def test_haproxy_takes_the_files(router, capsys):
    assert router.write() == 0
    assert (router.to / "homes.map").read_text().startswith("acme 1/") and not (router.to / "pools.map").read_text()
    assert mentions(capsys.readouterr().out, " ".join(start_command(router.to)), "--watch")
    checked = subprocess.run([*start_command(router.to), "-c"], capture_output=True, text=True)
    assert checked.returncode == 0 and "warning" not in checked.stderr.lower(), checked.stderr


def test_tenants_that_never_change_are_not_followed(router, replicas, capsys):
    router.describe({"all": replicas}, all={"state": None})
    assert router.write() == 0
    assert "--watch" not in capsys.readouterr().out


def test_host_names_and_several_pools(router, tmp_path):
    """A name that nobody knows yet keeps no other replica from its work."""
    other = Served(tmp_path, "other", [tenant("gamma")], models=("writer",))
    (other.repository / "writer" / "config.pbtxt").write_text(DECODER)
    described = json.loads(router.cluster.read_text())
    replica = {"id": 7, "name": "named", "http": "nobody.invalid:8000", "grpc": "nobody.invalid:8001"}
    described["pools"].append({"name": "other", "repository": str(other.repository), "replicas": [replica]})
    router.cluster.write_text(json.dumps(described))
    assert router.write() == 0
    assert (router.to / "pools.map").read_text() == "gamma other\n"
    config = (router.to / "haproxy.cfg").read_text()
    assert "/v2/models/writer/generate " in config and "^/v2/models/(writer)" in config


def test_of_a_missing_program_the_package_is_named():
    with refusing(HplmError, "none-such", "apt-get install haproxy"):
        program("none-such", "haproxy")


def test_a_haproxy_that_is_not_on_the_path_is_that_of_the_python_package(monkeypatch, tmp_path):
    monkeypatch.setattr("hplm.server.process.SYSTEM_FOLDER", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = program("haproxy", "haproxy")
    assert "HAProxy version" in subprocess.run([packaged, "-v"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "haproxy").symlink_to(packaged)
    assert program("haproxy", "haproxy") == str(tmp_path / "haproxy"), "PATH comes first"
    monkeypatch.setitem(IN_PYTHON_PACKAGES, "haproxy", ("none_such", "bin/haproxy"))
    (tmp_path / "haproxy").unlink()
    with refusing(HplmError, "pip install none-such"):
        program("haproxy", "haproxy")


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ("--port", ["--port", "0"]),
        ("--address", ["--address", "10.0.0.1:80"]),
        ("--stats-port", ["--port", "8000", "--stats-port", "8000"]),
        ("--stats-address", ["--stats-address", "10.0.0.1:80"]),
        ("--routers 0", ["--routers", "0"]),
        ("with space", ["--to", "/tmp/with space"]),
        (f"--to {__file__}", ["--to", __file__]),
        ("too long", ["--to", "/tmp/" + "x" * LONGEST_SOCKET]),
    ],
)
def test_a_wrong_option_is_named(refused, named, more):
    refused(named, more=more)


def test_what_is_wrong_in_the_description_is_named(router, refused, replicas):
    for field, value, named in (
        ("repository", "nowhere", "nowhere"),
        ("state", "nowhere", "nowhere"),
        ("repository", ".", router.folder),
    ):
        router.describe({"all": replicas}, all={field: value})
        refused(named)
    router.describe({"all": replicas}, all={"state": None})
    refused("'state'", more=["--watch"])
    router.served["new"] = router.served["all"]
    with fake_servers(1, "new-") as new:
        router.describe({"all": replicas, "new": new})
        refused("'acme'", "'all'", "'new'")


class Watched:
    """A router of two pools, and a watcher that looks when it is told to."""

    def __init__(self, router, served):
        self.router, self.served, self.said = router, served, []
        self.watcher = Watcher(Followed(read_pools(self.router.cluster)), self.router.to, self.said.append)

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


@pytest.mark.slow
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


@pytest.mark.slow
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
