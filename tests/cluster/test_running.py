"""What `hplm cluster` refuses before anything starts."""

import fcntl

import pytest

from hplm.cli.main import main
from hplm.cluster.running import LOCK
from hplm.server.ports import LOOPBACK, free_ports, listen
from tests.naming import names


def up(toy, folder, *more):
    return main(["cluster", "up", "--repository", str(toy.repository), "--folder", str(folder), "--port", "0", *more])


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No engine is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hplm.cluster.processes.SYSTEM_FOLDER", str(tmp_path))
    monkeypatch.setattr("hplm.cluster.running.haproxy", lambda: "haproxy")


def test_a_missing_engine_is_named_with_its_package(toy, tmp_path, nowhere, capsys):
    assert up(toy, tmp_path) == 1
    assert names(capsys.readouterr().err, "nginx", "apt-get install nginx-light")


def test_a_port_that_is_taken_is_refused(toy, tmp_path, capsys, engines):
    with listen(LOOPBACK, 0, "") as taken:
        port = taken.getsockname()[1]
        assert up(toy, tmp_path, "--port", str(port)) == 1
    assert names(capsys.readouterr().err, port, "--port")


def test_a_folder_of_another_cluster_is_refused(toy, tmp_path, capsys, engines):
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert up(toy, tmp_path) == 1
    assert names(capsys.readouterr().err, tmp_path, "--folder")


def test_all_ports_of_a_cluster_differ():
    assert len(set(free_ports(200))) == 200


@pytest.mark.parametrize(
    "options, named",
    [
        (["--replicas", "0"], ["--replicas 0"]),
        (["--cores", "99999"], ["core 99999"]),
        (["--placement", "none.json"], ["none.json"]),
        (["--placement", "none.json", "--replicas", "2"], ["--replicas", "--cores"]),
        (["--repository", "none"], ["none"]),
    ],
)
def test_options_that_cannot_be_are_refused(toy, tmp_path, options, named, capsys):
    assert up(toy, tmp_path, *options) == 1
    assert names(capsys.readouterr().err, *named)


@pytest.mark.parametrize("command", ["roll", "status"])
def test_a_cluster_that_does_not_run_is_named(tmp_path, command, capsys):
    assert main(["cluster", command, "--folder", str(tmp_path)]) == 1
    assert names(capsys.readouterr().err, tmp_path, "hplm cluster up")


@pytest.fixture
def engines(monkeypatch):
    """All engines are installed, as far as the command sees."""
    monkeypatch.setattr("hplm.cluster.running.haproxy", lambda: "haproxy")
    monkeypatch.setattr("hplm.cluster.running.nginx", lambda: "nginx")
