"""Parts of a real server are killed and stopped: every open request is answered or closed, and the server serves again."""

import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm.errors import HplmError
from hplm.server import Supervisor, TritonServer, held, supervisor
from hplm.server.held import holders
from hplm.server.stubs import regions, size_of, stubs
from testing.toy import WORDS
from tests.server.plain_models import ECHO, add_model
from tests.server.stock import Stock
from tests.server.test_engine_ends import engine_of
from tests.support.message import mentioning
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

TEXT = [" ".join(WORDS[:9])]


class Watched:
    """A server and its supervisor, which runs in a thread."""

    def __init__(self, repository):
        self.server = TritonServer(repository, start_timeout=120)
        self.server.start()
        self.said = []
        self.supervisor = Supervisor(self.server, self.said.append)
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ending.is_set():
            self.supervisor.look()

    def close(self):
        self.ending.set()
        self.thread.join()
        self.server.stop(drain=0)

    def ask(self, timeout=None):
        return Stock(self.server, "http").ask(TEXT, "acme", outputs=("LABEL",))["LABEL"].tolist()

    def answers_again(self, expected, seconds=90):
        until = time.monotonic() + seconds
        while True:
            try:
                assert self.ask() == expected
                return
            except (InferenceServerException, OSError, http.client.HTTPException):
                assert time.monotonic() < until, self.said
                time.sleep(0.2)

    def stub(self, model):
        return next(stub for stub in stubs(self.server.pid or 0) if stub.model == model)

    def metric(self, name):
        connection = http.client.HTTPConnection(self.server.metrics_url, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (.*)$", text, re.MULTILINE))

    def until(self, holds, seconds=90):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.said
            time.sleep(0.1)


@pytest.fixture(scope="module")
def watched(toy):
    watched = Watched(toy.repository)
    yield watched
    watched.close()


@pytest.fixture(scope="module")
def expected(watched):
    return watched.ask()


@pytest.mark.parametrize("model", ["toy-lookup", "hplm"])
def test_a_model_that_dies_idle_is_loaded_again_and_the_server_stays(watched, expected, model, monkeypatch):
    monkeypatch.setattr(held, "RECENT_NS", 0)  # it was asked just before
    server, dead = watched.server.pid, watched.stub(model)
    os.kill(dead.pid, signal.SIGKILL)
    watched.until(lambda: any(model in said and said.startswith("loaded") for said in watched.said))
    watched.answers_again(expected)
    assert watched.server.pid == server and watched.stub(model).pid != dead.pid
    assert dead.region not in regions(watched.server.id)


def test_a_model_that_was_loaded_while_the_server_served_is_loaded_again_too(watched, expected):
    model = "loaded-later"
    add_model(watched.server.repository, model, ECHO)
    try:
        address, (name, secret) = watched.server.http_url, watched.server.admin_header
        for change in ("load", "unload"):
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request("POST", f"/v2/repository/models/{model}/{change}", b"{}", {name: secret})
            assert connection.getresponse().status == 200
            connection.close()
            if change == "load":
                watched.until(lambda: model in watched.supervisor.watched)
                os.kill(watched.stub(model).pid, signal.SIGKILL)
                watched.until(lambda: any(model in said and said.startswith("loaded") for said in watched.said))
    finally:
        shutil.rmtree(watched.server.repository / model)
    watched.answers_again(expected)


def test_it_is_counted_and_the_new_process_counts_on(watched, expected):
    watched.until(lambda: watched.metric("hplm_model_restarts_total") == 1)  # the alias has no metrics
    before = watched.metric("hplm_lookup_requests_total")
    assert watched.ask() == expected
    watched.until(lambda: watched.metric("hplm_lookup_requests_total") > before)


def test_requests_that_a_dead_model_held_end_with_their_connections(watched, expected):
    os.kill(engine_of(watched.server), signal.SIGSTOP)  # so that upper holds them
    dead = watched.stub("toy-upper")

    def ask(_):
        try:
            return watched.ask()
        except (InferenceServerException, OSError, http.client.HTTPException) as error:
            return error

    with ThreadPoolExecutor(30) as pool:
        asked = [pool.submit(ask, number) for number in range(30)]
        eventually(lambda: sum(one.held for one in holders(watched.server.id) if one.pid == dead.pid) > 1)  # one may be a probe
        os.kill(dead.pid, signal.SIGKILL)
        answers = [one.result(timeout=60) for one in asked]
    assert all(answer == expected or isinstance(answer, Exception) for answer in answers)
    assert any(isinstance(answer, Exception) for answer in answers)
    watched.answers_again(expected)
    assert any(re.search(r"restarting.*toy-upper.* held \d+ requests", said) for said in watched.said)
    watched.until(lambda: watched.metric("hplm_server_restarts_total") == watched.server.restarts)


def test_a_server_that_ends_serves_again_at_the_same_address(watched, expected):
    url, restarts = watched.server.http_url, watched.server.restarts
    os.kill(watched.server.pid, signal.SIGKILL)
    watched.until(lambda: watched.server.restarts == restarts + 1)
    watched.answers_again(expected)
    assert watched.server.http_url == url
    assert any("SIGKILL" in said for said in watched.said)


def test_a_model_that_stands_still_is_replaced(watched, expected):
    """Triton 24.10 sometimes aborts when a model process does not move for a second, and sometimes calls it not healthy."""
    still = watched.stub("toy-lookup").pid
    os.kill(still, signal.SIGSTOP)
    watched.until(lambda: all(stub.pid != still for stub in stubs(watched.server.pid or 0)) and engine_of(watched.server))
    watched.until(lambda: watched.said[-1].startswith(("loaded", "Ready again")))
    watched.answers_again(expected)


def test_a_process_whose_shared_memory_has_grown_is_replaced_between_requests(watched, expected, monkeypatch):
    connection = http.client.HTTPConnection(watched.server.http_url, timeout=60)
    body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["x" * 30_000_000]}]}
    connection.request("POST", "/v2/models/toy/infer", json.dumps(body))
    assert connection.getresponse().status == 404
    connection.close()
    grown = watched.stub("toy-lookup")
    assert size_of(grown.region) > 25_000_000
    monkeypatch.setattr(supervisor, "RECYCLE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "REGIONS_SHARE", 30_000_000 / supervisor.shutil.disk_usage("/dev/shm").total)
    server = watched.server.pid
    watched.until(lambda: any(line.startswith("loaded") and "MB" in line for line in watched.said))
    monkeypatch.undo()
    watched.answers_again(expected)
    watched.until(lambda: all(size_of(region) < 25_000_000 for region in regions(watched.server.id)))
    assert watched.server.pid == server


def test_what_clients_send_is_private_and_so_is_the_secret(watched, expected):
    assert regions(watched.server.id)
    assert all(region.stat().st_mode & 0o077 == 0 for region in regions(watched.server.id))
    name, secret = watched.server.admin_header
    with open(f"/proc/{watched.server.pid}/cmdline") as arguments:
        shown = arguments.read()
    assert name in shown and secret not in shown
    assert watched.server.control().models()


def test_the_secret_may_be_given_but_not_with_characters_that_triton_reads_otherwise(toy, monkeypatch):
    monkeypatch.setenv("HPLM_ADMIN", "given-by_the.operator")
    assert TritonServer(toy.repository).admin_header[1] == "given-by_the.operator"
    monkeypatch.setenv("HPLM_ADMIN", "a=b")
    with pytest.raises(HplmError, match=mentioning("HPLM_ADMIN")):
        TritonServer(toy.repository)
