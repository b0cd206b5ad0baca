"""`hplm cluster` before fakes: it refuses what cannot work, goes on in order when a step fails, and ends in order."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hplm.cli.main import main
from hplm.cluster.control import SOCKET as CONTROL
from hplm.cluster.control import ask
from hplm.cluster.router import SOCKET, haproxy
from hplm.cluster.running import LOCK, ROUTER
from hplm.errors import HplmError
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.server.ports import LOOPBACK, listen, listens
from hplm.server.process_group import arguments
from hplm.tenants.snapshot import Snapshot
from loadtest.server import ServedCluster
from testing.toy import SERVED
from tests.cluster.fake_hplm import BROKEN, DRAINING, HELD, PROGRAM
from tests.cluster.front import Front
from tests.deploy.door import require_haproxy
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually


class FakeCluster(ServedCluster):
    PROGRAM = PROGRAM

    @property
    def router(self) -> Front:
        return Front(int(self.address.rpartition(":")[2]))

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        (self.folder / what).touch()
        try:
            yield
        finally:
            (self.folder / what).unlink()

    def pid(self, replica: str) -> int | None:
        log = str(self.folder.resolve() / "logs" / f"{replica}-triton.log")
        return next((pid for pid in self.processes() if log in arguments(pid)), None)

    def printed(self, replica: str) -> str:
        return (self.folder / "logs" / f"{replica}.log").read_text()


@pytest.fixture
def refused(toy, tmp_path, capsys):
    require_haproxy()

    def refused(*named, more=()):
        words = ["cluster", "up", "--repository", toy.repository, "--folder", tmp_path, "--port", "0", *more]
        assert main(list(map(str, words))) == 1
        assert mentions(said := capsys.readouterr().err, *named), said

    return refused


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
def test_options_that_cannot_be_are_refused(refused, options, named):
    refused(*named, more=options)


def test_what_is_of_an_earlier_version_missing_or_taken_is_refused(refused, tmp_path, capsys):
    with listen(LOOPBACK, 0, "") as taken:
        port = taken.getsockname()[1]
        refused(port, "--port", more=["--port", port])
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(tmp_path, "--folder")
    refused("--folder", more=["--folder", tmp_path / ("x" * 100)])  # too long for a socket
    for command in ("roll", "status"):
        assert main(["cluster", command, "--folder", str(tmp_path)]) == 1
        assert mentions(capsys.readouterr().err, tmp_path, "hplm cluster up")
    # A state of each group: without them, tenants that were deleted there would be served again.
    (tmp_path / "state/one/toy").mkdir(parents=True)
    (tmp_path / "state/one/toy/CURRENT").touch()
    refused(tmp_path / "state", "--state", more=["--placement", "placement.json"])


# A HAProxy whose port is open before its socket for commands is there, as on a busy machine.
LATE = """#!{python}
import os, re, socket, sys
if "-W" in sys.argv:
    port = re.search("bind 127.0.0.1:([0-9]+)", open(sys.argv[-1]).read())[1]
    with socket.create_server(("127.0.0.1", int(port))) as early:
        early.accept()
os.execv("{haproxy}", ["{haproxy}", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def cluster(toy, tmp_path_factory):
    require_haproxy()
    late = tmp_path_factory.mktemp("late") / "haproxy"
    late.write_text(LATE.format(python=sys.executable, haproxy=haproxy()))
    late.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{late.parent}:{os.environ['PATH']}")
        with FakeCluster(toy.repository, Path(folder)) as running:
            yield running


def states(cluster):
    return [own["is"] for own in cluster.status().values()]


@pytest.mark.slow
def test_questions_are_answered_and_bad_ones_harm_nobody(cluster):
    with pytest.raises(HplmError, match="'dance'"):
        ask(cluster.folder, "dance", print)
    for question in (b"", b"\xff\n", b"status\n"):
        with socket.socket(socket.AF_UNIX) as connection:  # of one who goes before the answer
            connection.connect(str(cluster.folder / CONTROL))
            connection.sendall(question)
    said = []
    assert ask(cluster.folder, "status", said.append).keys() == cluster.replicas.keys()
    assert [line.split()[0] for line in said] == list(cluster.replicas)


@pytest.mark.slow
def test_the_generation_of_a_replica_is_not_that_of_a_process_of_it_that_was_killed(cluster):
    readers = cluster.state / "toy/readers"
    readers.mkdir(exist_ok=True)
    written = {readers / "replica-1-1-a": (2, 60), readers / "replica-1-2-b": (7, -3600), readers / "replica-1-3-c": (9, -3600)}
    for file, (generation, ago) in written.items():
        file.write_text(f"{generation}\n")
        os.utime(file, (time.time() - ago,) * 2)
    assert [own["generations"]["toy"][0] for own in cluster.status().values()] == [7, 0]
    for file in written:
        file.unlink()


@pytest.mark.slow
def test_the_cluster_is_looked_after_while_a_replica_is_replaced(cluster):
    """Commands are answered meanwhile, but no second roll begins."""
    before = {name: cluster.pid(name) for name in cluster.replicas}
    with ThreadPoolExecutor(1) as client, cluster.told(DRAINING):
        rolled = client.submit(cluster.roll)
        eventually(lambda: "it drains" in cluster.printed("replica-1"))
        with pytest.raises(HplmError, match="busy"):
            cluster.roll()
        os.kill(before["replica-2"], signal.SIGKILL)
        eventually(
            lambda: cluster.pid("replica-2") not in (None, before["replica-2"]) and states(cluster) == ["replaced", "up"]
        )
        assert cluster.pid("replica-1") == before["replica-1"], "it may drain"
    assert rolled.result(PATIENCE) == {"rolled": ["replica-1", "replica-2"]}
    assert "drained" in cluster.printed("replica-1"), "else it was killed"
    assert "restarting    replica-2" in cluster.said() and "restarting    replica-1" not in cluster.said()
    assert not {cluster.pid(name) for name in cluster.replicas} & {None, *before.values()}
    assert states(cluster) == ["up", "up"]


@pytest.mark.slow
def test_a_roll_waits_until_the_other_replica_of_a_pool_works(cluster):
    with socket.socket(socket.AF_UNIX) as connection:
        with cluster.told(BROKEN):
            os.kill(cluster.pid("replica-2"), signal.SIGKILL)
            eventually(lambda: states(cluster) == ["up", "down"])
            connection.connect(str(cluster.folder / CONTROL))
            connection.sendall(b"roll\n")
            assert states(cluster) == ["up", "down"]  # the answer comes while the roll waits
        with connection.makefile() as answer:
            assert '"rolled": ["replica-1", "replica-2"]' in answer.read()
    assert states(cluster) == ["up", "up"]


@pytest.mark.slow
def test_a_failed_roll_names_its_first_error_and_the_next_one_succeeds(cluster):
    """HAProxy cannot be told either that the replica gets requests again."""
    control, away = cluster.folder / ROUTER / SOCKET, cluster.folder / "away"
    drained = cluster.printed("replica-1").count("drained")
    with ThreadPoolExecutor(1) as client, cluster.told(BROKEN):
        with cluster.told(DRAINING):
            rolled = client.submit(cluster.roll)
            eventually(lambda: cluster.printed("replica-1").count("it drains") > drained)
            control.rename(away)
        with pytest.raises(HplmError) as failed:
            rolled.result(PATIENCE)
        away.rename(control)
        assert mentions(failed.value, "replica-1", BROKEN)
        assert "replaced" not in states(cluster)
    eventually(lambda: "Ready" in cluster.printed("replica-1").rpartition(BROKEN)[2])
    assert cluster.roll()["rolled"] and states(cluster) == ["up", "up"]


@pytest.mark.slow
def test_a_placement_becomes_pools_and_ctrl_c_answers_requests_and_leaves_no_process_behind(toy):
    """A second start serves the changed truth."""
    cores = sorted(os.sched_getaffinity(0))
    cut = {"toy": ((0, toy.store.config.upper_layers - 1),)}
    groups = (
        Group("one", "here", (f"cpu:{cores[0]}",), 1, cut, ("toy/bio",)),
        Group("two", "here", (f"cpu:{cores[-1]}",), 1, cut, ("toy/law", "toy/root")),
    )
    units = (Unit("toy/bio", 3), Unit("toy/law", 2), Unit("toy/root", 3))
    export = Snapshot.load(toy.folder / "tenants.json").export
    gone, *others = SERVED
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:
        placement, up = Path(folder) / "placement.json", Path(folder) / "up"
        up.mkdir()
        (up / CONTROL).touch()  # of a cluster that was killed
        Placement(groups, units, {"toy": "fp32"}, {"toy": export}, "a cluster", "a profile").write(placement)
        with FakeCluster(toy.repository, up, None, more=["--placement", str(placement)]) as cluster:
            for one in SERVED:
                assert cluster.router.ask(one.id).replica == ("replica-1" if one.domain == "bio" else "replica-2"), one
            with pytest.raises(HplmError, match="pool 'one' has a single replica"):
                cluster.roll()
            manager = cluster.manager()
            manager.registry.begin()  # of the whole repository, which the second start serves
            manager.delete(gone.id)
            assert manager.settle() == []
            named = {pid: arguments(pid) for pid in cluster.processes()}
            assert any("haproxy" in words[0] for words in named.values())
            with ThreadPoolExecutor(1) as client, cluster.told(HELD):
                asked = client.submit(cluster.router.ask, others[0].id)
                eventually(lambda: any(own["in_flight"] for own in cluster.status().values()))
                cluster.process.ask_to_end(signal.SIGINT)
                eventually(lambda: not listens(cluster.router.port))
                assert cluster.process.pid is not None and not asked.done()
            assert asked.result(PATIENCE).status == 200
            cluster.process.finish(PATIENCE)
            assert cluster.said().endswith("stopped\n")
        eventually(lambda: not any(pid for pid, words in named.items() if arguments(pid) == words))
        with FakeCluster(toy.repository, up, replicas=1) as cluster:
            assert {one.id for one in cluster.manager().current().tenants} == {one.id for one in others}
            assert cluster.router.ask(others[0].id).replica == "replica-1"
