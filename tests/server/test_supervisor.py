"""Parts of a real server are killed and stopped: open requests are answered or closed, and the server serves again."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.errors import HplmError
from hplm.server import Supervisor, TritonServer
from hplm.server.held import holders
from hplm.server.stubs import regions, size_of, stubs
from testing.toy import WORDS
from tests.backbones import NAMES, WHOLE, emit_two, make_two
from tests.server.plain_models import ECHO, add_model
from tests.server.stock import LIBRARIES, Stock
from tests.server.test_engine_ends import engine_of
from tests.support.message import mentioning, mentions
from tests.support.servers import kill_model, published
from tests.support.wait import PATIENCE, eventually, stop

pytestmark = pytest.mark.slow

TEXT = [" ".join(WORDS[:9])]
LONG = 3 * PATIENCE  # for restarts of the server
CLOSED = (InferenceServerException, OSError, http.client.HTTPException)
REQUESTS = 30
UPPER = "toy+deep-upper"  # of both backbones


class Watched:
    """A server and its supervisor, which looks when a test says so."""

    def __init__(self, repository):
        self.server = TritonServer(repository, log_file=repository.with_suffix(".log"), start_timeout=120)
        self.server.start()
        self.supervise()

    def supervise(self, **options):
        self.said = []
        self.supervisor = Supervisor(self.server, self.said.append, **options)

    def close(self):
        self.server.stop(drain=0)

    def ask(self):
        """Returns the labels of both backbones."""
        stock = Stock(self.server, "http")
        return [stock.ask(TEXT, "acme", outputs=("LABEL",), model=name)["LABEL"].tolist() for name in NAMES]

    def answers(self):
        try:
            return self.ask()
        except CLOSED as error:
            return error

    def stub(self, model):
        return next(stub for stub in stubs(self.server.pid or 0) if stub.model == model)

    def until(self, holds):
        """Lets the supervisor look until this holds."""
        eventually(lambda: holds() or self.supervisor.look(), LONG)

    def until_said(self, beginning, *words):
        self.until(lambda: any(line.startswith(beginning) and mentions(line, *words) for line in self.said))

    def until_idle(self):
        """Returns when no request can be lost with a model's process."""
        eventually(lambda: not any(one.may_have_lost for one in holders(self.server.id)))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A group of two backbones with one engine. A test adds a model to its repository."""
    folder = tmp_path_factory.mktemp("two")
    repository, _ = make_two(folder)
    watched = Watched(emit_two(repository, folder / "groups", WHOLE))
    yield watched, watched.ask()
    watched.close()


@pytest.fixture
def watched(started):
    if started[0].server.pid is None:  # a test has stopped it
        started[0].server.start()
    started[0].supervise()
    return started[0]


@pytest.fixture
def expected(started):
    return started[1]


@pytest.mark.parametrize("model", ["toy-lookup", "hplm", UPPER])
def test_a_model_that_dies_idle_is_loaded_again_and_the_server_stays(watched, expected, model):
    server, dead = watched.server.pid, watched.stub(model)
    before = published(watched.server, "hplm_model_restarts_total"), published(watched.server, "hplm_lookup_requests_total")
    watched.until_idle()
    kill_model(watched.server, model)
    watched.until_said("loaded", model)
    watched.until(lambda: watched.answers() == expected)  # a new engine takes its time
    assert watched.server.pid == server and watched.stub(model).pid != dead.pid
    assert dead.region not in regions(watched.server.id)
    if model == "toy-lookup":
        eventually(lambda: published(watched.server, "hplm_model_restarts_total") > before[0])
        eventually(lambda: published(watched.server, "hplm_lookup_requests_total") > before[1])  # the new process counts on


def test_a_model_that_was_loaded_while_the_server_served_is_loaded_again_too(watched, expected):
    model = "loaded-later"
    add_model(watched.server.repository, model, ECHO)
    try:
        for change in ("load", "unload"):
            connection = http.client.HTTPConnection(watched.server.http_url, timeout=PATIENCE)
            connection.request("POST", f"/v2/repository/models/{model}/{change}", b"{}", dict([watched.server.admin_header]))
            assert connection.getresponse().status == 200
            connection.close()
            if change == "load":
                watched.until(lambda: model in watched.supervisor.watched)
                kill_model(watched.server, model)
                watched.until_said("loaded", model)
    finally:
        shutil.rmtree(watched.server.repository / model)
    assert watched.ask() == expected


def test_requests_that_a_dead_model_held_end_with_their_connections(watched, expected):
    """Takes long: a start of Triton."""
    stop(engine_of(watched.server))  # so that upper holds them
    dead = watched.stub(UPPER)
    with ThreadPoolExecutor(REQUESTS) as pool:
        asked = [pool.submit(watched.answers) for _ in range(REQUESTS)]  # each has asked one backbone
        eventually(lambda: sum(one.held for one in holders(watched.server.id) if one.pid == dead.pid) == REQUESTS)
        os.kill(dead.pid, signal.SIGKILL)
        watched.until(lambda: all(one.done() for one in asked))
    assert all(isinstance(one.result(), CLOSED) for one in asked)
    watched.until(lambda: watched.answers() == expected)
    assert any(re.search(rf"restarting.*{re.escape(UPPER)}.* held \d+ requests", said) for said in watched.said)
    eventually(lambda: published(watched.server, "hplm_server_restarts_total", backbone="toy") == watched.server.restarts)


def test_a_model_that_stands_still_is_replaced(watched, expected):
    """Triton 24.10 sometimes aborts when a model process does not move for a second, and sometimes calls it not healthy.

    Takes long: a probe that nobody answers, and perhaps a start of Triton.
    """
    still = watched.stub("toy-lookup").pid
    stop(still)
    watched.until(lambda: all(stub.pid != still for stub in stubs(watched.server.pid or 0)) and engine_of(watched.server))
    watched.until(lambda: watched.answers() == expected)
    assert watched.said[-1].startswith(("loaded", "Ready again"))


def test_a_process_whose_shared_memory_has_grown_is_replaced_between_requests(watched, expected):
    connection = http.client.HTTPConnection(watched.server.http_url, timeout=PATIENCE)
    body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["x" * 30_000_000]}]}
    connection.request("POST", "/v2/models/toy/infer", json.dumps(body))
    assert connection.getresponse().status == 404
    connection.close()
    assert size_of(watched.stub("toy-lookup").region) > 25_000_000
    server = watched.server.pid
    watched.supervise(regions_share=30_000_000 / shutil.disk_usage("/dev/shm").total)
    watched.until_said("loaded", "MB")
    assert watched.ask() == expected and watched.server.pid == server
    watched.until(lambda: all(size_of(region) < 25_000_000 for region in regions(watched.server.id)))


def test_what_clients_send_is_private_and_so_is_the_secret(watched):
    watched.supervisor.look()  # some models were loaded after the server's start
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


def test_hplm_watch_says_whether_all_models_work_and_revives_a_dead_one(watched, monkeypatch, capsys):
    """Takes long: two starts of the command, and of a model."""
    server, control = watched.server, watched.server.control()

    def watch(*options, secret=True, url=server.http_url):
        """Returns the exit code and what was said."""
        monkeypatch.setenv("HPLM_ADMIN", server.admin_header[1] if secret else "")
        code, said = main(["watch", "--url", url, "--once", *options]), capsys.readouterr()
        assert bool(code) == bool(said.err) and said.err.count("\n") <= 1
        return code, said.err or said.out

    code, said = watch()
    assert code == 0 and mentions(said, len(control.probes(control.models())))
    assert watch("--models", "toy-lookup", UPPER, secret=False)[0] == 0
    for options, named in (
        ({"url": "127.0.0.1:1"}, ["127.0.0.1:1", "--url"]),
        ({"secret": False}, ["HPLM_ADMIN"]),
    ):
        code, said = watch(**options)
        assert code == 1 and mentions(said, *named)
    code, said = watch("--models", "nobody")
    assert code == 1 and mentions(said, "nobody")
    environment = {**os.environ, "HPLM_ADMIN": server.admin_header[1]}
    for attempt in range(2):  # the second watcher does not know how often it was loaded again
        watched.until_idle()
        kill_model(server, "toy-lookup")
        if not attempt:
            code, said = watch()
            assert code == 1 and mentions(said, "toy-lookup")
        command = [sys.executable, "-m", "hplm.cli.main", "watch", "--url", server.http_url]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as watching:
            assert mentions(watching.stdout.readline(), "loaded", "toy-lookup")
            watching.kill()
    assert watch()[0] == 0


def outcome(stock, backbone):
    try:
        stock.ask(TEXT * 4, "acme", outputs=("LABEL",), model=backbone)
        return "answered"
    except InferenceServerException as error:
        if "[draining]" in error.message() and error.status() in ("503", "StatusCode.UNAVAILABLE"):
            return "draining"
        closed = error.status() == "StatusCode.UNAVAILABLE" and "[" not in error.message()  # gRPC's word for it
        return "closed" if closed else f"{error.status()} {error.message()}"
    except (OSError, http.client.HTTPException):
        return "closed"


def test_while_a_server_stops_clients_meet_their_answer_or_draining_or_a_closed_connection(watched):
    """Of both backbones and over both protocols, each by itself. Triton would wait for an idle connection."""
    idle = http.client.HTTPConnection(watched.server.http_url, timeout=PATIENCE)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    server, ending = watched.server, threading.Event()
    ways = [(backbone, protocol) for backbone in NAMES for protocol in LIBRARIES]
    met = {way: Counter() for way in ways}

    def ask_on(backbone, protocol):
        stock, own = Stock(server, protocol), met[backbone, protocol]
        while not ending.is_set() and own["closed"] < 100:
            own[outcome(stock, backbone)] += 1

    with ThreadPoolExecutor(2 * len(ways)) as pool:
        asking = [pool.submit(ask_on, *way) for way in ways * 2]
        try:
            eventually(lambda: all(own["answered"] > 20 for own in met.values()))
        finally:
            try:
                server.stop()
            finally:
                ending.set()
        for one in asking:
            one.result(timeout=PATIENCE)
    assert all(set(own) <= {"answered", "draining", "closed"} for own in met.values()), met
    assert all(sum(met[way]["draining"] for way in ways if way[1] == protocol) for protocol in LIBRARIES), met
    assert "Waiting for in-flight requests" not in server.log_file.read_text(), "Triton has waited"
    idle.close()
