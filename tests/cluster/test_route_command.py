"""`hplm route`: what it writes, and what it refuses."""

import json
import subprocess

import pytest

from hplm.cli.main import main
from hplm.cluster.router import LONGEST_SOCKET, start_command
from hplm.errors import HplmError
from hplm.server.process import program
from tests.cluster.router import Router, Served, fake_servers, tenant
from tests.support.message import mentions, refusing

DECODER = 'name: "writer"\nmodel_transaction_policy { decoupled: true }\n'


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


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ("--port", ["--port", "0"]),
        ("--address", ["--address", "10.0.0.1:80"]),
        ("--stats-port", ["--port", "8000", "--stats-port", "8000"]),
        ("--stats-address", ["--stats-address", "10.0.0.1:80"]),
        ("--routers 0", ["--routers", "0"]),
        ("with space", ["--to", "/tmp/with space"]),
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
