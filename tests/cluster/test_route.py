"""`hplm route`: what it writes and refuses, cluster.json, and which HAProxy is taken."""

import json
import subprocess

import pytest

from hplm.cli.main import main
from hplm.cluster.description import Replica, is_address, read_replicas
from hplm.cluster.router import LONGEST_SOCKET, default_door, start_command
from hplm.errors import HplmError, InvalidInput
from hplm.server.process import IN_PYTHON_PACKAGES, program
from loadtest.proxy import CONFIG, make_certificate
from tests.cluster.router import Router, fake_servers
from tests.support.message import mentioning, mentions, refusing

DECODER = 'name: "writer"\nmodel_transaction_policy { decoupled: true }\n'
ONE = {"id": 1, "name": "one", "http": "10.0.0.1:8000", "grpc": "10.0.0.1:8001"}
TWO = {"id": 2, "name": "two", "http": "hplm-1.hplm:8000", "grpc": "[::1]:8001"}


@pytest.fixture
def replicas():
    with fake_servers(2) as replicas:
        yield replicas


@pytest.fixture
def router(tmp_path, replicas):
    router = Router(tmp_path, replicas)
    yield router
    router.close()


@pytest.fixture
def refused(router, capsys):
    def refused(*named, more=()):
        assert main([*router.arguments, *map(str, more)]) == 1
        assert mentions(said := capsys.readouterr().err, *named), said

    return refused


def checked(router, **variables):
    done = subprocess.run(
        ["env", *map("=".join, variables.items()), *start_command(router.to), "-c"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr


def test_haproxy_takes_the_file_of_a_router_and_of_a_front_door_before_all_replicas(router, tmp_path, capsys):
    assert router.write() == 0
    assert mentions(capsys.readouterr().out, " ".join(start_command(router.to)))
    checked(router)
    assert router.write("--door") == 0
    checked(router, HPLM_CERTIFICATE=str(make_certificate(tmp_path)[1]))
    config = (router.to / "haproxy.cfg").read_text()
    assert 'presetenv HPLM_BACKBONES    "toy"' in config and "!{ var(txn.tenant) -m str big }" in config
    assert config.count("server replica-2 ") == config.count("balance hash var(txn.home)") == 7


def test_the_front_door_of_deploy_is_the_template_before_one_server():
    assert CONFIG.read_text("utf-8") == default_door(), "write it anew: python -m hplm.cluster.router"


def test_decoders_are_probed_and_host_names_may_be_unknown(router):
    """A name that nobody knows yet keeps no other replica from its work."""
    (router.repository / "toy" / "config.pbtxt").write_text(DECODER)
    described = json.loads(router.cluster.read_text())
    described["replicas"].append({"id": 7, "name": "named", "http": "nobody.invalid:8000", "grpc": "nobody.invalid:8001"})
    router.cluster.write_text(json.dumps(described))
    assert router.write() == 0
    assert '/v2/models/toy/generate" ' in (router.to / "haproxy.cfg").read_text()


def test_of_a_missing_program_the_package_is_named():
    with refusing(HplmError, "none-such", "apt-get install haproxy"):
        program("none-such", "haproxy")


def test_a_haproxy_that_is_not_on_the_path_is_that_of_the_python_package(router, monkeypatch, tmp_path, capsys):
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
    assert router.write() == 0 and (router.to / "haproxy.cfg").stat().st_size, "it is for another machine"
    assert mentions(said := capsys.readouterr().out, "no HAProxy has checked", "pip install none-such") and "start:" not in said


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ("--port", ["--port", "0"]),
        ("--address", ["--address", "10.0.0.1:80"]),
        ("--stats", ["--port", "8000", "--stats", "0.0.0.0:8000"]),
        ("--stats", ["--stats", "8404"]),
        ("--routers 0", ["--routers", "0"]),
        ("with space", ["--to", "/tmp/with space"]),
        (f"--to {__file__}", ["--to", __file__]),
        ("too long", ["--to", "/tmp/" + "x" * LONGEST_SOCKET]),
    ],
)
def test_a_wrong_option_is_named(refused, named, more):
    refused(named, more=more)


def test_a_repository_that_is_none_is_named(router, refused, replicas):
    for value, named in (("nowhere", "nowhere"), (".", router.folder)):
        router.describe(replicas, repository=value)
        refused(named)


@pytest.fixture
def read(tmp_path):
    def read(*replicas, **fields):
        file = tmp_path / "cluster.json"
        described = {"repository": "model_repository", "replicas": replicas}
        file.write_text(json.dumps({"kind": "hplm replicas", "format": 1, **described, **fields}))
        return read_replicas(file)

    return read


def test_paths_begin_at_the_file(read, tmp_path):
    described = read(ONE, TWO)
    assert described.repository == str(tmp_path / "model_repository") and read(ONE, repository="/other").repository == "/other"
    assert described.replicas == (Replica(**ONE), Replica(**TWO)) and not described.spread
    assert [one.has_name for one in described.replicas] == [False, True]


@pytest.mark.parametrize(
    ("replicas", "fields", "named"),
    [
        ([], {}, ["replicas"]),
        ([ONE], {"pools": []}, ["'pools'"]),
        ([{**ONE, "port": 1}], {}, ["replicas[0]", "'port'"]),
        ([ONE, {**TWO, "id": 1}], {}, ["id", "1"]),
        ([ONE, {**TWO, "name": "one"}], {}, ["name", "'one'"]),
        ([ONE, {**TWO, "http": ONE["http"]}], {}, ["http", "'10.0.0.1:8000'"]),
        ([{**ONE, "name": "All Of Them"}], {}, ["replicas[0].name"]),
        ([{**ONE, "name": "all\n"}], {}, ["replicas[0].name"]),
        ([{**ONE, "id": 0}], {}, ["replicas[0].id"]),
        ([{**ONE, "grpc": "10.0.0.1"}], {}, ["replicas[0]", "10.0.0.1", "HOST:PORT"]),
        ([ONE], {"spread": ["two words"]}, ["spread[0]"]),
        ([ONE], {"kind": "hplm cluster"}, ["hplm cluster"]),
    ],
)
def test_a_wrong_description_names_the_thing(read, replicas, fields, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        read(*replicas, **fields)


@pytest.mark.parametrize(
    ("addresses", "right"),
    [
        ("localhost:1|10.0.0.1:65535|a-b.c_d:80|[::1]:8000|[fe80::1]:1", True),
        ("|:80|host|host:|host:0|host:65536|host:8a|::1:80|http://host:80|a b:80|host:80 check|a/b:1", False),
    ],
)
def test_addresses(addresses, right):
    assert [address for address in addresses.split("|") if is_address(address) != right] == []
