"""Parts of a real server are killed and stopped: every open request is answered or closed, and the server serves again."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm.errors import HplmError
from hplm.server import Supervisor, TritonServer
from hplm.server.held import holders
from hplm.server.stubs import regions, size_of, stubs
from testing.toy import WORDS
from tests.server.plain_models import ECHO, add_model
from tests.server.stock import Stock
from tests.server.test_engine_ends import engine_of
from tests.support.message import mentioning, mentions
from tests.support.servers import kill_model, published
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

TEXT = [" ".join(WORDS[:9])]
LONG = 3 * PATIENCE  # for restarts of the server
CLOSED = (InferenceServerException, OSError, http.client.HTTPException)
REQUESTS = 30
COMMAND = [sys.executable, "-m", "hplm.cli.main"]


class Watched:
    """A server and its supervisor, which looks when a test says so."""

    def __init__(self, repository):
        self.server = TritonServer(repository, start_timeout=120)
        self.server.start()
        self.supervise()

    def supervise(self, **options):
        self.said = []
        self.supervisor = Supervisor(self.server, self.said.append, **options)

    def close(self):
        self.server.stop(drain=0)

    def ask(self):
        return Stock(self.server, "http").ask(TEXT, "acme", outputs=("LABEL",))["LABEL"].tolist()

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
def started(toy, tmp_path_factory):
    """A server of a copy of the toy, because a test adds a model."""
    watched = Watched(shutil.copytree(toy.repository, tmp_path_factory.mktemp("watched") / "repository"))
    yield watched, watched.ask()
    watched.close()


@pytest.fixture
def watched(started):
    started[0].supervise()
    return started[0]


@pytest.fixture
def expected(started):
    return started[1]


@pytest.mark.parametrize("model", ["toy-lookup", "hplm"])
def test_a_model_that_dies_idle_is_loaded_again_and_the_server_stays(watched, expected, model):
    server, dead = watched.server.pid, watched.stub(model)
    before = published(watched.server, "hplm_model_restarts_total"), published(watched.server, "hplm_lookup_requests_total")
    watched.until_idle()
    kill_model(watched.server, model)
    watched.until_said("loaded", model)
    assert watched.ask() == expected
    assert watched.server.pid == server and watched.stub(model).pid != dead.pid
    assert dead.region not in regions(watched.server.id)
    if model != "hplm":  # the alias has no metrics
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
    os.kill(engine_of(watched.server), signal.SIGSTOP)  # so that upper holds them
    dead = watched.stub("toy-upper")
    with ThreadPoolExecutor(REQUESTS) as pool:
        asked = [pool.submit(watched.answers) for _ in range(REQUESTS)]
        eventually(lambda: sum(one.held for one in holders(watched.server.id) if one.pid == dead.pid) == REQUESTS)
        os.kill(dead.pid, signal.SIGKILL)
        watched.until(lambda: all(one.done() for one in asked))
    assert all(isinstance(one.result(), CLOSED) for one in asked)
    watched.until(lambda: watched.answers() == expected)
    assert any(re.search(r"restarting.*toy-upper.* held \d+ requests", said) for said in watched.said)
    eventually(lambda: published(watched.server, "hplm_server_restarts_total") == watched.server.restarts)


def test_a_server_that_ends_serves_again_at_the_same_address_and_drains_no_more(watched, expected):
    """Takes long: a start of Triton."""
    drain = [*COMMAND, "drain", "--at-least", "0"]
    environment = {**os.environ, "HPLM_SERVER_ID": watched.server.id}
    done = subprocess.run(drain, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "all requests are answered" in done.stdout
    refused = watched.answers()
    assert isinstance(refused, InferenceServerException) and "[draining]" in str(refused)
    url, restarts = watched.server.http_url, watched.server.restarts
    os.kill(watched.server.pid, signal.SIGKILL)
    watched.until(lambda: watched.server.restarts == restarts + 1)
    assert watched.ask() == expected and watched.server.http_url == url
    assert any("SIGKILL" in said for said in watched.said)


def test_a_model_that_stands_still_is_replaced(watched, expected):
    """Triton 24.10 sometimes aborts when a model process does not move for a second, and sometimes calls it not healthy.

    Takes long: a probe that nobody answers, and perhaps a start of Triton.
    """
    still = watched.stub("toy-lookup").pid
    os.kill(still, signal.SIGSTOP)
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


def watch(server, *options: str, secret: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HPLM_ADMIN": server.admin_header[1] if secret else ""}
    command = [*COMMAND, "watch", "--url", server.http_url, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_hplm_watch_says_whether_all_models_work_and_revives_a_dead_one(watched):
    """Takes long: eight starts of the command."""
    server = watched.server
    well = watch(server, "--once")
    assert (well.returncode, well.stderr) == (0, "") and mentions(well.stdout, 3)
    assert watch(server, "--once", "--models", "toy-lookup", "toy-upper", secret=False).returncode == 0
    for options, secret, named in ((["--models", "nobody"], True, "nobody"), ([], False, "HPLM_ADMIN")):
        refused = watch(server, "--once", *options, secret=secret)
        assert refused.returncode == 1 and mentions(refused.stderr, named)
    environment = {**os.environ, "HPLM_ADMIN": server.admin_header[1]}
    command = [*COMMAND, "watch", "--url", server.http_url]
    for attempt in range(2):  # the second watcher does not know how often it was loaded again
        watched.until_idle()
        kill_model(server, "toy-lookup")
        if not attempt:
            dead = watch(server, "--once")
            assert dead.returncode == 1 and mentions(dead.stderr, "toy-lookup")
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as watching:
            assert mentions(watching.stdout.readline(), "loaded", "toy-lookup")
            watching.kill()
    assert watch(server, "--once").returncode == 0


def test_hplm_watch_names_the_address_of_a_server_that_does_not_answer():
    command = [*COMMAND, "watch", "--url", "127.0.0.1:1", "--once"]
    absent = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert absent.returncode == 1 and absent.stderr.count("\n") == 1 and mentions(absent.stderr, "127.0.0.1:1", "--url")
