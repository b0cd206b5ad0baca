"""A whole cluster on this machine, with two real servers and HAProxy, as `hplm cluster up` runs it."""

import json
import math
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.cluster import Material
from builder.store.store import Store
from hplm.cli.main import main
from loadtest.chaos.history import OK, Asker, History, Question, expected_answers
from loadtest.server import ServedCluster
from testing.toy import TENANTS, WORDS
from tests.deploy.door import require_haproxy
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

TEXTS = [" ".join(WORDS[number : number + 5]) for number in (0, 20, 40)]
NAMES = [tenant.id for tenant in TENANTS if tenant.task == "classify"]
KEYED = "gaia"  # gets a key


@pytest.fixture(scope="module")
def cluster(toy):
    require_haproxy()
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder, ServedCluster(toy.repository, Path(folder)) as running:
        yield running


def test_all_replicas_answer_what_one_server_answers_and_are_replaced_without_a_failed_request(cluster):
    """Clients ask the router without a pause. Takes two starts of Triton."""
    questions = [Question(name, text) for name in NAMES for text in TEXTS]
    expected = expected_answers(next(iter(cluster.replicas.values())), "toy", questions)
    before = {name: (own["requests"], cluster.pids(name)) for name, own in cluster.status().items()}
    with History([Asker(cluster.address, "toy") for _ in range(2)], expected) as history:
        eventually(lambda: all(own["requests"] > before[name][0] + 20 for name, own in cluster.status().items()))
        assert cluster.roll()["rolled"] == list(cluster.replicas)
    assert history.counts().keys() == {OK}, history.reasons()
    assert all(set(cluster.pids(name)).isdisjoint(pids) for name, (_, pids) in before.items())


def test_the_benchmark_measures_it_while_tenants_come_and_go(cluster, toy, tmp_path, monkeypatch, capfd):
    """`hplm bench cluster` measures this cluster instead of one that it starts. Each replica must answer each new tenant.

    Takes some seconds.
    """
    store = Store(shutil.copytree(toy.store.folder, tmp_path / "store"))
    material = Material(store, toy.repository, [*NAMES, KEYED], TEXTS * 22)
    monkeypatch.setattr("bench.cluster.ServedCluster", lambda *_: nullcontext(cluster))
    monkeypatch.setattr(Material, "made", lambda *_: material)
    assert main(["bench", "cluster", "--quick", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert all(math.isfinite(figures[name]) for name in ("proxy_over_direct", "hop_p50_ms", "add_p99_s", "revoke_s"))
    assert figures["after_delete"] == 0  # answers for a tenant that all replicas have deleted
