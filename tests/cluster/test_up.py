"""A whole cluster on this machine, with two real servers and HAProxy, as `hplm cluster up` runs it."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.live import add_tenant
from builder.store.store import Store
from hplm_client import HplmClient, NoTenant
from loadtest.chaos.history import OK, History, Question, expected_answers
from loadtest.server import ServedCluster
from testing.random_store import random_tenant
from testing.toy import TENANTS, WORDS
from tests.cluster.router import require_haproxy
from tests.server.stock import Stock
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

TEXTS = [" ".join(WORDS[number : number + 5]) for number in (0, 20, 40)]
TEXT = " ".join(WORDS[:20])
NAMES = [tenant.id for tenant in TENANTS if tenant.task == "classify"]
AT_ONCE = 3  # requests of a tenant with quotas


@pytest.fixture(scope="module")
def cluster(toy):
    require_haproxy()
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder, ServedCluster(toy.repository, Path(folder)) as running:
        yield running


def by_stock(protocol):
    def ask(address, name):
        return Stock(SimpleNamespace(http_url=address, grpc_url=address), protocol).ask([TEXT], name)["LOGITS"][0]

    return ask


def by_ours(protocol):
    def ask(address, name):
        with HplmClient(address, protocol, "toy") as client:
            return np.array([client.infer(TEXT, tenant=name, logits=True).rows[0].logits])

    return ask


STOCK, OURS = ([by(protocol) for protocol in ("http", "grpc")] for by in (by_stock, by_ours))


def requests(cluster):
    """Returns how many requests each replica has got, when none is in flight."""
    eventually(lambda: not any(own["in_flight"] for own in cluster.status().values()))
    return Counter({name: own["requests"] for name, own in cluster.status().items()})


def used(cluster, ask, name):
    """Returns the replica that gets a request of a tenant who has no others, and the answer."""
    before = requests(cluster)
    answer = ask(cluster.address, name)
    (replica,) = requests(cluster) - before
    return replica, answer


def test_each_client_gets_the_tenants_answer_from_the_tenants_replica(cluster, reference):
    for name in NAMES:
        found = [used(cluster, ask, name) for ask in (*STOCK, *OURS)]
        assert len({replica for replica, _ in found}) == 1, name
        for _, answer in found:
            assert np.abs(answer - reference.forward(TEXT, name).numpy()).max() <= 1e-3, name


def test_quotas_hold_over_all_replicas(cluster):
    tenant, homes, manager = "hugo", 2, cluster.manager()
    manager.limit(tenant, rate=0.0001, burst=AT_ONCE * homes, homes=homes)
    assert manager.settle_now() == []  # the router has it too
    admitted, before = 0, requests(cluster)
    for ask in STOCK * 12:
        try:
            ask(cluster.address, tenant)
            admitted += 1
        except InferenceServerException as error:
            assert "[quota]" in error.message()
    assert AT_ONCE <= admitted <= AT_ONCE * homes
    assert len(requests(cluster) - before) == homes
    manager.limit(tenant, rate=0, homes=1)
    assert manager.settle_now() == []


def test_a_tenant_comes_and_goes_on_all_replicas(cluster, toy, tmp_path):
    store = Store(shutil.copytree(toy.store.folder, tmp_path / "store"))
    random_tenant(store, replace(TENANTS[0], id="guest"), 0.3, seed=77)
    manager = cluster.manager()
    added = add_tenant(manager, store, "guest").generation
    assert manager.settle(added) == []
    clients = [HplmClient(address) for address in (*cluster.replicas.values(), cluster.address)]
    for client in clients:
        assert client.infer(TEXTS[0], tenant="guest").label
    assert manager.settle(manager.delete("guest").generation) == []
    assert all(own["generations"] == {"toy": [added + 1, added + 1]} for own in cluster.status().values())
    for client in clients:
        with pytest.raises(NoTenant):
            client.infer(TEXTS[0], tenant="guest")
        client.close()


def test_all_replicas_answer_what_one_server_answers_and_are_replaced_without_a_failed_request(cluster):
    """Clients ask the router without a pause. Takes two starts of Triton."""
    questions = [Question(name, text) for name in NAMES for text in TEXTS]
    expected = expected_answers(next(iter(cluster.replicas.values())), "toy", questions)
    before = {name: (own["requests"], cluster.pids(name)) for name, own in cluster.status().items()}
    with History(cluster.address, ["toy"], expected, clients=2) as history:
        eventually(lambda: all(own["requests"] > before[name][0] + 20 for name, own in cluster.status().items()))
        assert cluster.roll()["rolled"] == list(cluster.replicas)
    assert history.counts().keys() == {OK}, history.reasons()
    assert all(set(cluster.pids(name)).isdisjoint(pids) for name, (_, pids) in before.items())
