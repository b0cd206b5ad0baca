"""Two real servers behind the router, asked by stock clients and by ours, over HTTP and gRPC."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from hplm.cluster.description import ClusterDescription
from hplm.cluster.watching import Served, Watcher
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.tenants.manager import Manager
from hplm_client import HplmClient
from testing.toy import TENANTS, WORDS
from tests.cluster.router import Router, require_haproxy
from tests.server.stock import LIBRARIES, Stock
from tests.support.servers import kill_model, serving

pytestmark = pytest.mark.slow

NAMES = [tenant.id for tenant in TENANTS if tenant.task == "classify"]
TEXT = " ".join(WORDS[:20])
AT_ONCE = 3  # requests of a tenant with quotas


class StockAtRouter(Stock):
    def __init__(self, router, protocol):
        self._library = LIBRARIES[protocol]
        self._client = self._library.InferenceServerClient(f"127.0.0.1:{router.port}")

    @property
    def client(self):
        return self._client


def by_stock(protocol):
    def ask(router, name, **headers):
        return StockAtRouter(router, protocol).ask([TEXT], name, headers=headers)["LOGITS"][0]

    return ask


def in_json(router, name, **headers):
    tensor = tritonclient.http.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[TEXT]], dtype=object), binary_data=False)
    output = tritonclient.http.InferRequestedOutput("LOGITS", binary_data=False)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{router.port}") as client:
        answer = client.infer("toy", [tensor], outputs=[output], headers=headers, parameters={"tenant": name})
        return answer.as_numpy("LOGITS")[0]


def by_ours(protocol):
    def ask(router, name):
        with HplmClient(f"127.0.0.1:{router.port}", protocol, "toy") as client:
            return np.array([client.infer(TEXT, tenant=name, logits=True).rows[0].logits])

    return ask


STOCK = (by_stock("http"), by_stock("grpc"), in_json)
OURS = by_ours("http"), by_ours("grpc")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    begin(Folder(state / "toy"))
    return state


@pytest.fixture(scope="module")
def servers(toy, state):
    require_haproxy()
    with serving(toy.repository, state=state) as one, serving(toy.repository, state=state) as two:
        yield one, two


@pytest.fixture(scope="module")
def router(toy, state, servers, tmp_path_factory):
    replicas = [
        SimpleNamespace(name=f"replica-{number}", http=server.http_url, grpc=server.grpc_url)
        for number, server in enumerate(servers, start=1)
    ]
    served = {"all": SimpleNamespace(repository=toy.repository, state=state)}
    router = Router(tmp_path_factory.mktemp("router"), {"all": replicas}, served)
    try:
        assert router.write() == 0
        router.start()
        router.until_up()
        yield router
    finally:
        router.close()


def used(router, ask, name):
    """Returns the replica that gets a request of a tenant who has no others."""
    router.until_idle()
    before = router.requests()
    ask(router, name)
    router.until_idle()
    (replica,) = router.requests() - before
    return replica


def test_each_client_gets_the_tenants_answer_from_the_tenants_replica(router, reference):
    for name in NAMES:
        expected, homes = reference.forward(TEXT, name).numpy(), set()
        for ask in (*STOCK, *OURS):
            answers = []
            homes.add(used(router, lambda *given: answers.append(ask(*given)), name))  # noqa: B023
            assert np.abs(answers[0] - expected).max() <= 1e-3
        assert len(homes) == 1


@pytest.mark.parametrize("ask", STOCK)
def test_a_header_unlike_the_parameter_and_an_unknown_tenant_are_refused(router, ask):
    with pytest.raises(InferenceServerException, match=r"\[invalid_input\].*hplm-tenant"):
        ask(router, "acme", **{"hplm-tenant": "echo"})
    for name in ("nobody", "No Body", ""):
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            ask(router, name)


def test_a_tenant_cannot_hide_from_the_router(router):
    """Only the server reads the escape."""
    body = json.dumps({"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [TEXT]}]})
    status, answer = router.post(body[:-1].encode() + b',"parameters":{"ten\\u0061nt":"echo"}}')
    assert status == 400 and "[invalid_input]" in answer["error"] and "hplm-tenant" in answer["error"]


@pytest.mark.parametrize("homes", [1, 2])
def test_quotas_hold_over_all_replicas(toy, state, router, homes):
    watcher = Watcher(Served(ClusterDescription.read(router.cluster)), router.to, print)
    manager = Manager.open(toy.repository, state)
    tenant = "echo" if homes == 1 else "hugo"
    manager.limit(tenant, rate=0.0001, burst=AT_ONCE * homes, homes=homes)
    assert not manager.settle_now()
    watcher.look()
    admitted, replicas = Counter(), Counter()
    for ask in STOCK * 8:
        before = router.requests()
        try:
            ask(router, tenant)
            admitted[ask] += 1
        except InferenceServerException as error:
            assert "[quota]" in error.message()
        router.until_idle()
        replicas += router.requests() - before
    assert admitted.total() <= AT_ONCE * homes and admitted.total() >= AT_ONCE
    assert len(replicas) == homes
    manager.limit(tenant, rate=0, homes=1)
    watcher.look()


def test_a_server_whose_model_is_dead_is_passed_by(router, servers):
    """Triton still calls it ready."""
    kill_model(servers[0], "toy-lookup")
    router.until_up(but=("replica-1",))
    for name in NAMES:
        assert used(router, OURS[0], name) == used(router, STOCK[1], name) == "replica-2"
