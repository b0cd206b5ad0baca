"""A whole cluster on this machine, with real servers and HAProxy, as `hplm cluster up` runs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from builder.publish.live import add_tenant
from builder.store.store import Store
from hplm.errors import HplmError
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.server.process_group import arguments
from hplm.tenants.snapshot import Snapshot
from hplm_client import HplmClient, HplmClientError, NoTenant
from loadtest.chaos.history import OK, UNANSWERED, WRONG, History, Question, expected_answers
from loadtest.server import ServedCluster
from testing.random_store import random_tenant
from testing.toy import TENANTS, WORDS
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.skipif(
            shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists(), reason=f"{name} is not installed"
        )
        for name in ("haproxy",)
    ),
]
STARTING = 400.0  # seconds that a server may take to start on the slowest machine
TEXTS = [" ".join(WORDS[number : number + 5]) for number in (0, 20, 40)]


@pytest.fixture(scope="module")
def cluster(toy):
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder, ServedCluster(toy.repository, Path(folder)) as running:
        yield running


@pytest.fixture
def history(cluster, toy):
    """Clients that ask the router without a pause. Their answers are compared with those of a server alone."""
    questions = [Question(tenant.id, text) for tenant in TENANTS if tenant.task == "classify" for text in TEXTS]
    expected = expected_answers(next(iter(cluster.replicas.values())), toy.store.config.name, questions)
    asking = History(cluster.address, [toy.store.config.name], expected, clients=4)
    yield asking
    asking.stop()


def test_a_tenant_comes_and_goes_on_all_replicas(cluster, toy, tmp_path):
    store = Store(shutil.copytree(toy.store.folder, tmp_path / "store"))
    random_tenant(store, replace(TENANTS[0], id="guest"), 0.3, seed=77)
    manager = cluster.manager()
    assert manager.settle(add_tenant(manager, store, "guest").generation) == []
    clients = [HplmClient(address) for address in (*cluster.replicas.values(), cluster.address)]
    for client in clients:
        assert client.infer(TEXTS[0], tenant="guest").label
    assert manager.settle(manager.delete("guest").generation) == []
    assert all(own["generations"] == {"toy": [2, 2]} for own in cluster.status().values())
    for client in clients:
        with pytest.raises(NoTenant):
            client.infer(TEXTS[0], tenant="guest")
        client.close()


def test_both_replicas_answer_what_one_server_answers_and_the_death_of_one_loses_no_request(cluster, history):
    victim = next(iter(cluster.replicas))
    before = {name: own["requests"] for name, own in cluster.status().items()}
    eventually(lambda: all(own["requests"] > before[name] + 20 for name, own in cluster.status().items()))
    assert history.counts().keys() == {OK}, history.reasons()
    killed = cluster.kill(victim)
    eventually(lambda: f"restarting    {victim} ended with signal SIGKILL" in cluster.said())
    eventually(lambda: cluster.is_back(victim, killed), STARTING)
    history.stop()
    counts = history.counts()
    assert (counts[UNANSWERED], counts[WRONG]) == (0, 0), history.reasons()


def test_all_replicas_are_replaced_without_a_failed_request(cluster, toy):
    failures, answered, ending = [], Counter(), threading.Event()

    def ask(number):
        with HplmClient(cluster.address, backbone=toy.store.config.name) as client:
            while not ending.is_set():
                try:
                    client.infer(TEXTS[number % len(TEXTS)], tenant=TENANTS[number % len(TENANTS)].id)
                    answered[number] += 1
                    ending.wait(0.02)  # the servers that start need the cores too
                except HplmClientError as error:
                    failures.append(error)

    def look(_):
        threading.Thread(target=lambda: seen.append({own["is"] for own in cluster.status().values()})).start()

    seen = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    before = {name: cluster.pids(name) for name in cluster.replicas}
    try:
        assert cluster.roll(look)["rolled"] == list(cluster.replicas)
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert min(answered[number] for number in range(4)) > 0
    assert {"replaced", "up"} in seen  # other questions are answered meanwhile
    after = {name: cluster.pids(name) for name in cluster.replicas}
    assert all(set(after[name]).isdisjoint(before[name]) for name in before)


def test_a_placement_becomes_pools_and_ctrl_c_leaves_no_process_behind(toy, monkeypatch):
    """A second start serves the changed truth. Each start of a cluster takes seconds."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    cores = sorted(os.sched_getaffinity(0))
    cut = {"toy": ((0, toy.store.config.upper_layers - 1),)}
    groups = (
        Group("one", "here", (f"cpu:{cores[0]}",), 1, cut, ("toy/bio",)),
        Group("two", "here", (f"cpu:{cores[-1]}",), 1, cut, ("toy/law", "toy/root")),
    )
    units = (Unit("toy/bio", 3), Unit("toy/law", 2), Unit("toy/root", 3))
    export = Snapshot.load(toy.folder / "tenants.json").export
    gone, *others = (tenant.id for tenant in TENANTS)
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:
        placement, up = Path(folder) / "placement.json", Path(folder) / "up"
        Placement(groups, units, {"toy": "fp32"}, {"toy": export}, "a cluster", "a profile").write(placement)
        with ServedCluster(toy.repository, up, None, more=["--placement", str(placement)]) as cluster:
            with HplmClient(cluster.address) as client:
                for tenant in (gone, *others):
                    client.infer(TEXTS[0], tenant=tenant)
            with pytest.raises(HplmError, match="pool 'one' has a single replica"):
                cluster.roll()
            manager = cluster.manager()
            manager.registry.begin()  # of the whole repository, which the second start serves
            assert manager.settle(manager.delete(gone).generation) == []
            named = {pid: arguments(pid) for pid in cluster.processes()}
            assert any("haproxy" in words[0] for words in named.values())
            cluster.process.send_signal(signal.SIGINT)
            try:
                cluster.process.wait(120)
            except subprocess.TimeoutExpired:
                cluster.process.send_signal(signal.SIGABRT)  # it prints where it is
                cluster.process.wait()
                pytest.fail(f"the cluster does not end:\n{cluster.said()}")
            assert cluster.process.returncode == 0 and cluster.said().endswith("stopped\n")
        eventually(lambda: not any(pid for pid, words in named.items() if arguments(pid) == words))
        with ServedCluster(toy.repository, up, replicas=1) as cluster, HplmClient(cluster.address) as client:
            client.infer(TEXTS[0], tenant=others[0])
            with pytest.raises(NoTenant):
                client.infer(TEXTS[0], tenant=gone)
