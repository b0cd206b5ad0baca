"""Two real servers behind HAProxy, as docs/cluster.md starts them on one machine."""

import json
import math
import re
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench.cluster import Material
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.cli.main import main
from hplm.tenants.manager import Manager
from loadtest.chaos.history import OK, REFUSED, Asker, History, TenantText, expected_answers
from loadtest.cluster import ServedCluster, description, serve_commands
from loadtest.encode import infer_request
from loadtest.generator import Load
from testing.random_store import random_tenant
from testing.toy import TENANTS, WORDS
from tests.deploy.door import require_haproxy
from tests.deploy.image import PAGES, commands_of_pages
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

TEXTS = [" ".join(WORDS[number : number + 5]) for number in (0, 20, 40)]
NAMES = [tenant.id for tenant in TENANTS if tenant.task == "classify"]
KEYED = "gaia"  # gets a key


@pytest.fixture(scope="module")
def cluster(toy):
    """Runs the page's commands, with other ports and this repository."""
    require_haproxy()
    serves = [words for words in commands_of_pages("cluster") if words[0] == "serve"]
    (described,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGES["cluster"], re.DOTALL)]
    assert serves == serve_commands(2) and described == description(2), "`hplm bench cluster` starts the same"
    with (
        tempfile.TemporaryDirectory(prefix="hplm-") as folder,
        ServedCluster(toy.repository, Path(folder), serves=serves, described=described) as running,
    ):
        yield running


def test_all_replicas_answer_what_one_server_answers_and_one_is_stopped_without_a_failed_request(cluster):
    """SIGTERM of one of them while clients ask the router without a pause, and its start. Takes three starts of Triton."""
    questions = [TenantText(name, text) for name in NAMES for text in TEXTS]
    (stopped, address), _ = cluster.replicas.items()
    expected, before = expected_answers(address, "toy", questions), cluster.requests()

    def all_asked(since):
        eventually(lambda: all(count > since[name] + 20 for name, count in cluster.requests().items()))

    with History([Asker(cluster.address, "toy") for _ in range(2)], expected) as history:
        all_asked(before)
        cluster.terminate(stopped)
        cluster.start(stopped)
        cluster.until_up(stopped)
        all_asked(cluster.requests())
    assert history.counts().keys() == {OK}, history.reasons()


def test_a_limited_tenant_that_floods_the_router_gets_its_limit_and_not_one_at_each_replica(cluster):
    rate, manager = 20.0, cluster.manager()
    manager.limit(NAMES[0], rate=rate)
    try:
        assert manager.settle() == []
        header = f"\r\nhplm-tenant: {NAMES[0]}\r\n".encode()
        request = infer_request("toy", TEXTS[:1], NAMES[0]).replace(b"\r\n", header, 1)
        report = Load(cluster.address, [request], seconds=3.0, connections=8).run()
        assert report.failures.total() > report.succeeded >= rate, report.failures
        assert report.succeeded <= 1.1 * (rate + rate * report.wall_s)  # as many at once as in a second
    finally:
        manager.limit(NAMES[0], rate=0)
        assert manager.settle() == []


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


def test_a_new_export_is_rolled_over_both_without_a_failed_request_of_tenants_with_keys(cluster, toy, tmp_path):
    """The last one here: it leaves the cluster with the new export. Takes two ends and two starts of Triton."""
    old, new, state = cluster.manager(), tmp_path / "new", tmp_path / "state"
    questions = [TenantText(name, TEXTS[0], old.add_key(name)[0]) for name in NAMES]
    old.settle()
    store = Store(shutil.copytree(toy.store.folder, tmp_path / "store"))
    random_tenant(store, TenantVersion("later", 1, "root", 1, "classify", ["a", "b"], 4), 0.3, seed=1)  # its content is another
    export(store, new, ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    places = ["--repository", new, "--state", state, "--from", cluster.state, "--from-repository", cluster.repository]
    assert main(["begin", *map(str, places)]) == 0
    expected = expected_answers(cluster.address, "toy", questions)
    with History([Asker(cluster.address, "toy") for _ in range(2)], expected) as history:
        for replica in cluster.replicas:
            cluster.terminate(replica)
            cluster.start(replica, new, state)
            cluster.until_up(replica)
            before = cluster.requests()[replica]
            eventually(lambda replica=replica, before=before: cluster.requests()[replica] > before + 20)
    assert history.counts().keys() == {OK}, history.reasons()
    Manager.open(new, state).delete(NAMES[0])
    with Asker(cluster.address, "toy") as asker:
        eventually(lambda: asker.ask(questions[0]).outcome == REFUSED)
        assert asker.ask(questions[1]).outcome == OK
