"""`hplm cluster` refuses what cannot work before anything starts, and goes on in order when a step fails."""

import fcntl
from types import SimpleNamespace

import pytest

from hplm.cli.main import main
from hplm.cluster.pools import LocalPool, replicas_of
from hplm.cluster.running import LOCK, Cluster
from hplm.cluster.traffic import Share
from hplm.errors import HplmError
from hplm.server.ports import LOOPBACK, listen
from hplm.server.triton import DRAIN_SECONDS
from tests.support.message import mentions


def up(toy, folder, *more):
    return main(["cluster", "up", "--repository", str(toy.repository), "--folder", str(folder), "--port", "0", *more])


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
    assert mentions(capsys.readouterr().err, *named)


def test_states_of_single_groups_are_refused(toy, tmp_path, capsys):
    """Without them, tenants that were deleted there would be served again."""
    (tmp_path / "state/one/toy").mkdir(parents=True)
    (tmp_path / "state/one/toy/CURRENT").touch()
    assert up(toy, tmp_path, "--placement", "placement.json") == 1
    assert mentions(capsys.readouterr().err, tmp_path / "state", "--state")


def test_what_is_missing_or_taken_is_refused(toy, tmp_path, capsys, engines):
    def refused(*named, more=()):
        assert up(toy, tmp_path, *more) == 1
        assert mentions(capsys.readouterr().err, *named)

    with listen(LOOPBACK, 0, "") as taken:
        port = taken.getsockname()[1]
        refused(port, "--port", more=["--port", str(port)])
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(tmp_path, "--folder")
    for command in ("roll", "status"):
        assert main(["cluster", command, "--folder", str(tmp_path)]) == 1
        assert mentions(capsys.readouterr().err, tmp_path, "hplm cluster up")


@pytest.fixture
def engines(monkeypatch):
    """HAProxy is installed, as far as the command sees."""
    monkeypatch.setattr("hplm.cluster.running.haproxy", lambda: "haproxy")


@pytest.fixture
def cluster(tmp_path, engines):
    return Cluster([LocalPool("all", tmp_path, replicas_of(tmp_path, 2))], tmp_path / "state", tmp_path, 0, lambda _: None)


class FailingReplica(SimpleNamespace):
    def replace(self, meanwhile):
        raise HplmError("its server does not start")


class AwayWhenGivenBack:
    """A HAProxy that ends while a replica is replaced."""

    def share(self, replica):
        return Share(in_flight=0, requests=0, is_up=True, drains=False)

    def drain(self, replica):
        pass

    def give_back(self, replica):
        raise HplmError("HAProxy does not answer")


def test_a_failed_roll_names_its_first_error_and_leaves_no_replica_replaced(cluster):
    cluster._replicas = [FailingReplica(id=i, name=f"replica-{i}", http="", metrics="") for i in (1, 2)]
    cluster._traffic = AwayWhenGivenBack()
    with pytest.raises(HplmError, match="its server does not start"):
        cluster.roll(lambda _: None)
    assert {own["is"] for own in cluster.status(lambda _: None).values()} == {"up"}


def test_the_router_may_finish_requests_as_long_as_servers_would(cluster):
    waited = []
    cluster._router = SimpleNamespace(ask_to_end=lambda _: None, wait_for_end=waited.append, stop=lambda _: None)
    cluster._stop()
    assert waited and waited[0] >= DRAIN_SECONDS
