"""An emitted group of two backbones on a real Triton: one engine answers for both, while tenants change and if it is killed."""

import http.client
import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from builder.store.store import TenantFile
from hplm.errors import error_in
from hplm.server import held
from hplm.server.probing import State
from hplm.server.stubs import stubs
from hplm.tenants.manager import Manager
from hplm_client import HplmClient
from testing.random_store import random_tenant
from testing.reference import Reference
from testing.toy import TENANTS, WORDS
from tests.backbones import CUT, NAMES, WHOLE, emit_two, make_two
from tests.places import knowledge
from tests.server.stock import Stock
from tests.server.test_engine_ends import engine_of
from tests.server.test_supervisor import Watched
from tests.support.answers import Comparison
from tests.support.servers import serving
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two stages take two cores"),
]
TEXT = " ".join(WORDS[:12])
TRIES = 8  # of which one is without bad luck


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return make_two(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def references(two):
    repository, _ = two
    return {name: Reference.open(repository / name / "1") for name in NAMES}


@pytest.mark.parametrize("cuts", [WHOLE, CUT], ids=["one stage", "two stages"])
def test_one_engine_answers_for_both(two, references, tmp_path, cuts):
    group = emit_two(two[0], tmp_path / "groups", cuts)
    asked = [(name, tenant.id, " ".join(WORDS[n : n + 1 + n % 12])) for n in range(4) for tenant in TENANTS for name in NAMES]
    comparison = Comparison()
    with serving(group) as server:
        assert sum(stub.model.endswith("-upper") for stub in stubs(server.pid)) == 1
        stock = Stock(server, "grpc")
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda own: stock.ask([own[2]], own[1], model=own[0])["LOGITS"][0], asked))
        for (name, tenant, text), logits in zip(asked, found, strict=True):
            expected = references[name].forward(text, tenant).numpy()
            comparison.add(f"{name}/{tenant}", logits[: len(expected)], expected)
        with HplmClient(server.http_url) as client:
            assert client.backbones() == sorted(NAMES)
        eventually(lambda: all(f'hplm_batches_total{{backbone="{name}"}}' in _metrics(server) for name in NAMES))
    comparison.assert_equal("fp32")


def _metrics(server):
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as answer:
        return answer.read().decode()


class Asking:
    """Asks a tenant all the time, and keeps what is said."""

    def __init__(self, stock, name, tenant):
        self._stock, self._name, self._tenant = stock, name, tenant
        self.answered, self.refused = [], []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self):
        while not self._ending.is_set():
            try:
                self.answered.append(self._stock.ask([TEXT], self._tenant, model=self._name)["LOGITS"][0])
            except InferenceServerException as error:
                self.refused.append(error.message())

    def close(self):
        self._ending.set()
        self._thread.join()


def test_a_tenant_is_added_to_one_while_the_other_is_asked_and_both_survive_their_engine(two, references, tmp_path):
    repository, stores = two
    group, state = emit_two(repository, tmp_path / "groups", CUT), tmp_path / "state"
    random_tenant(stores["deep"], TenantFile("new", 1, "root", 1, "classify", ["x", "y"], 4), 0.3, seed=40)
    with serving(group, state=state) as server:
        stock = Stock(server, "http")
        asking = Asking(Stock(server, "http"), "toy", "acme")
        try:
            manager = Manager.open(group, state, backbone="deep")
            assert manager.settle(manager.add("new", knowledge(stores["deep"], "new")).generation) == []
            expected = Reference.open(group / "deep/1", state).forward(TEXT, "new").numpy()
            comparison = Comparison()
            comparison.add("new", stock.ask([TEXT], "new", model="deep")["LOGITS"][0, : len(expected)], expected)
            found = stock.ask([TEXT], "new", model="hplm", outputs=["LOGITS"])["LOGITS"][0, : len(expected)]
            comparison.add("new", found, expected)
            before = len(asking.answered)
            eventually(lambda: len(asking.answered) > before + 3)
            assert not asking.refused
            killed = engine_of(server)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: all(_answers(stock, name) for name in NAMES))
            assert engine_of(server) not in (None, killed)
            before = len(asking.answered)
            eventually(lambda: len(asking.answered) > before + 3)
        finally:
            asking.close()
        assert {error_in(message).word for message in asking.refused} <= {"crashed", "draining"}
        comparison.add("new", stock.ask([TEXT], "new", model="deep")["LOGITS"][0, : len(expected)], expected)
        acme = references["toy"].forward(TEXT, "acme").numpy()
        for logits in asking.answered:
            comparison.add("acme", logits[: len(acme)], acme)
        comparison.assert_equal("fp32")


def _answers(stock, name):
    try:
        return stock.ask([TEXT], "acme", model=name)["LOGITS"].size
    except (InferenceServerException, OSError, http.client.HTTPException):
        return False


def said(watched, beginning, *words):
    return any(line.startswith(beginning) and all(word in line for word in words) for line in watched.said)


def test_a_dead_model_of_a_group_is_loaded_again_and_probed_by_its_name(two, tmp_path, monkeypatch):
    monkeypatch.setattr(held, "RECENT_NS", 0)  # it was asked just before
    watched = Watched(emit_two(two[0], tmp_path / "groups", WHOLE))
    try:
        stock, upper = Stock(watched.server, "http"), "toy+deep-upper"
        control = watched.server.control()
        probes = control.probes(control.models())
        assert upper in probes and all(control.probe(model, probe, 60).state is State.WORKS for model, probe in probes.items())
        expected = [stock.ask([TEXT], "acme", model=name)["LABEL"].tolist() for name in NAMES]
        # If the process dies with a probe, or with a lock of Triton's, the server is started again instead.
        for _ in range(TRIES):
            watched.said.clear()
            server, dead = watched.server.pid, watched.stub(upper)
            os.kill(dead.pid, signal.SIGKILL)
            watched.until(lambda: said(watched, "loaded", upper) or said(watched, "Ready again"))
            eventually(lambda: all(_answers(stock, name) for name in NAMES))
            assert [stock.ask([TEXT], "acme", model=name)["LABEL"].tolist() for name in NAMES] == expected
            assert watched.stub(upper).pid != dead.pid
            if watched.server.pid == server:
                break
        assert said(watched, "loaded", upper) and watched.server.pid == server
    finally:
        watched.close()
