"""`hplm route`: what it writes, and what it refuses."""

import json
import subprocess

import pytest

from hplm.cli.main import main
from hplm.cluster.router import LONGEST_SOCKET, start_command
from tests.cluster.router import Router, Served, fake_servers, require_haproxy, tenant

DECODER = 'name: "writer"\nmodel_transaction_policy { decoupled: true }\n'


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path, "all", [tenant("acme", rate=5.0), tenant("beta")])


@pytest.fixture
def router(tmp_path, served):
    require_haproxy()
    with fake_servers(2) as replicas:
        router = Router(tmp_path, {"all": replicas}, {"all": served})
        router.replicas = replicas
        yield router
        router.close()


def test_haproxy_takes_the_files(router, capsys):
    assert router.write() == 0
    assert (router.to / "homes.map").read_text().startswith("acme 1/") and not (router.to / "pools.map").read_text()
    said = capsys.readouterr().out
    assert " ".join(start_command(router.to)) in said and "--watch" in said
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


def test_without_haproxy_the_package_is_named(router, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert router.write() == 1
    assert "apt-get install haproxy" in capsys.readouterr().err
    assert not list(router.to.iterdir())
    assert main_with(router, "--unchecked") == 0
    assert (router.to / "haproxy.cfg").exists()


def main_with(router, *more):
    return main([*router.arguments, *map(str, more)])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--port", "0"], "--port"),
        (["--address", "10.0.0.1:80"], "--address"),
        (["--port", "8000", "--stats-port", "8000"], "--stats-port"),
        (["--stats-address", "10.0.0.1:80"], "--stats-address"),
        (["--routers", "0"], "--routers 0"),
        (["--to", "/tmp/with space"], "with space"),
        (["--to", "/tmp/" + "x" * LONGEST_SOCKET], "too long"),
    ],
)
def test_a_wrong_option_is_named(router, capsys, more, named):
    assert main_with(router, *more) == 1
    assert named in capsys.readouterr().err


def test_two_pools_with_one_tenant_are_refused(router, served, capsys):
    with fake_servers(1, "new-") as new:
        router.served["new"] = served
        router.describe({"all": router.replicas, "new": new})
        assert router.write() == 1
        error = capsys.readouterr().err
        assert "'acme'" in error and "'all'" in error and "'new'" in error
        router.describe({"all": router.replicas, "new": new}, new={"tenants": ["beta"]})
        assert router.write() == 0
        assert (router.to / "pools.map").read_text() == "beta new\n"


def test_a_missing_repository_state_or_backbone_is_named(router, served, capsys):
    for field, value in (("repository", "nowhere"), ("state", "nowhere"), ("repository", ".")):
        router.describe({"all": router.replicas}, all={field: value})
        assert router.write() == 1
        assert (value if value != "." else str(router.folder)) in capsys.readouterr().err
    router.describe({"all": router.replicas})
    described = json.loads(router.cluster.read_text())
    del described["pools"][0]["state"]
    router.cluster.write_text(json.dumps(described))
    assert main_with(router, "--watch") == 1
    assert "'state'" in capsys.readouterr().err
