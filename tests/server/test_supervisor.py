"""Parts of a real server are killed and stopped: open requests are answered or closed, and the server serves again."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.errors import RESEND, HplmError, error_in
from hplm.plot.table import Table
from hplm.server import Supervisor, TritonServer
from hplm.server.held import holders
from hplm.server.stubs import regions, stubs
from testing.random_store import SPECIAL
from testing.toy import WORDS
from tests.backbones import NAMES
from tests.server.asking import Asking
from tests.server.stock import LIBRARIES, body_of, posted
from tests.support.message import mentioning, mentions
from tests.support.metrics import Scraped
from tests.support.servers import engine_of, kill_model
from tests.support.wait import PATIENCE, eventually, stop

pytestmark = pytest.mark.slow
on_group = pytest.mark.server("group")

TEXT = [" ".join(WORDS[:9])]
LONG = 3 * PATIENCE  # for restarts of the server
CLOSED = (InferenceServerException, OSError, http.client.HTTPException)
REQUESTS = 30


class Watched:
    """A server, its answers when it was well, and its supervisor, which looks when a test says so."""

    def __init__(self, lease):
        self.server, self.stock = lease.server, lease.stock()
        self.expected = self.ask()
        self.upper = "toy-upper"
        self.said = []
        # It looks more often than `hplm serve` does, and waits less for what a server that is not busy does at once.
        self.supervisor = Supervisor(self.server, self.said.append, look_s=0.1, probe_s=1.5)

    def ask(self):
        """Returns the labels of both backbones, or why there are none."""
        try:
            return [self.stock.ask(TEXT, "acme", outputs=("LABEL",), model=name)["LABEL"].tolist() for name in NAMES]
        except CLOSED as error:
            return error

    def stub(self, model):
        return next(stub for stub in stubs(self.server.pid) if stub.model == model)

    def kill_idle(self, *models):
        """Kills the processes of models when no request can be lost with them."""
        eventually(lambda: not any(one.may_have_lost for one in holders(self.server.id)))
        for model in models:
            kill_model(self.server, model)

    def until(self, holds):
        """Lets the supervisor look until this holds."""
        eventually(lambda: holds() or self.supervisor.look(), LONG)

    def until_loaded(self, *words):
        self.until(lambda: any(line.startswith("loaded") and mentions(line, *words) for line in self.said))

    def until_as_before(self):
        self.until(lambda: self.ask() == self.expected)  # a new engine takes its time


@pytest.fixture
def watched(server):
    return Watched(server)


@on_group
def test_models_that_die_idle_are_loaded_again_and_the_server_stays(watched):
    """Takes long: one model after the other is loaded again."""
    server, counts = watched.server.pid, ("hplm_model_restarts_total", "hplm_lookup_requests_total")
    before = Scraped(watched.server)
    dead = [watched.stub(model) for model in ("hplm", watched.upper, "toy-lookup")]
    watched.kill_idle(*(stub.model for stub in dead))
    for stub in dead:
        watched.until_loaded(stub.model)
    watched.until_as_before()
    for stub in dead:
        assert watched.server.pid == server and watched.stub(stub.model).pid != stub.pid, stub.model
        assert stub.region not in regions(watched.server.id), stub.model
    for count in counts:  # the new process of lookup counts on
        eventually(lambda count=count: Scraped(watched.server, before).of(count) > 0)


@on_group
def test_requests_that_a_dead_model_held_end_with_their_connections(watched):
    """Takes long: a start of Triton."""
    stop(engine_of(watched.server))  # so that upper holds them
    dead = watched.stub(watched.upper)
    with ThreadPoolExecutor(REQUESTS) as pool:
        asked = [pool.submit(watched.ask) for _ in range(REQUESTS)]  # each has asked one backbone
        eventually(lambda: sum(one.held for one in holders(watched.server.id) if one.pid == dead.pid) == REQUESTS)
        os.kill(dead.pid, signal.SIGKILL)
        watched.until(lambda: all(one.done() for one in asked))
    assert all(isinstance(one.result(), CLOSED) for one in asked)
    watched.until_as_before()
    assert any(re.search(rf"restarting.*{re.escape(watched.upper)}.* held \d+ requests", said) for said in watched.said)
    eventually(lambda: Scraped(watched.server).of("hplm_server_restarts_total", backbone="toy") == watched.server.restarts)


@on_group
def test_a_model_that_stands_still_is_replaced(watched):
    """Triton 24.10 sometimes aborts when a model process does not move for a second, and sometimes calls it not healthy.

    Takes long: a probe that nobody answers, and perhaps a start of Triton.
    """
    still = watched.stub("toy-lookup").pid
    stop(still)
    watched.until(lambda: all(stub.pid != still for stub in stubs(watched.server.pid or 0)) and engine_of(watched.server))
    watched.until_as_before()
    assert watched.said[-1].startswith(("loaded", "Ready again"))


@on_group
def test_a_tenant_whose_texts_end_the_engine_is_quarantined_and_others_are_served(server):
    """Its table is cut while it is mapped, so that reading a row ends the process with SIGBUS. Takes long: three engines.

    The tenant is the test's own, because it stays refused for ten minutes.
    """
    stock, poison = server.stock(), server.tenant(domain="bio").id
    table = Table(server.model_folder() / "plot/bio/1")
    grams = table.space.unpack(table.index.by_row())
    text = " ".join(WORDS[token - 1 - len(SPECIAL)] for token in next(gram for gram in grams if (gram > len(SPECIAL)).all()))
    values = table.folder / "values"
    content = values.read_bytes()

    def said_to(tenant):
        """Returns the word of the error that a tenant gets, None for an answer."""
        try:
            stock.ask([text], tenant)
        except InferenceServerException as error:
            return error_in(error.message()).word

    def status(**headers):
        """Returns the status of a request that the engine loses before it has it. Routers send 501 on to another server."""
        return posted(server, ("toy", "infer"), body_of(["a"], parameters={"tenant": "beta"}), **headers)[0]

    def end_engine_by_its_texts():
        eventually(lambda: said_to("beta") is None)
        os.truncate(values, 0)
        try:
            return said_to(poison)
        finally:
            values.open("r+b").write(content)

    def counted(name):
        return Scraped(server).of(f"hplm_{name}", backbone="toy")

    restarts, lost = counted("engine_restarts_total"), counted("lost_requests_total")
    with Asking(server.stock, ["beta", "echo"], WORDS[:5]) as others:
        assert [end_engine_by_its_texts() for _ in range(2)] == ["crashed", "crashed"]
        eventually(lambda: said_to(poison) == "quarantined")
        others.wait_for(lambda tenant, text, answer: not isinstance(answer, Exception), 50)
    assert {error_in(str(error)).word for error in others.failures()} <= {"crashed", "draining"}
    assert said_to("acme") is None, "of the same domain, and no suspect"
    eventually(lambda: counted("quarantined_tenants") == 1)
    assert counted("engine_restarts_total") == restarts + 2
    assert counted("lost_requests_total") >= lost + 2
    eventually(lambda: not server.held)
    killed = engine_of(server.server)
    stop(killed)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(status), pool.submit(status, **{RESEND: "1"})
        eventually(lambda: server.held == 2)
        os.kill(killed, signal.SIGKILL)
        assert [one.result() for one in asked] == [503, 501]
    eventually(lambda: engine_of(server.server) not in (None, killed))
    eventually(lambda: said_to("beta") is None)


@on_group
def test_what_clients_send_is_private(watched):
    watched.supervisor.look()  # some models were loaded after the server's start
    assert {region.stat().st_mode & 0o077 for region in regions(watched.server.id)} == {0}
    assert watched.server.control().models()


def test_the_secret_may_be_given_but_not_with_characters_that_triton_reads_otherwise(toy, monkeypatch):
    monkeypatch.setenv("HPLM_ADMIN", "given-by_the.operator")
    assert TritonServer(toy.repository).admin_header[1] == "given-by_the.operator"
    monkeypatch.setenv("HPLM_ADMIN", "a=b")
    with pytest.raises(HplmError, match=mentioning("HPLM_ADMIN")):
        TritonServer(toy.repository)


@on_group
def test_hplm_watch_says_whether_all_models_work_and_revives_a_dead_one(watched, monkeypatch, capsys):
    """Takes long: a start of the command, and of a model."""
    server, control = watched.server, watched.server.control()

    def watch(*options, secret=server.admin_header[1], url=server.http_url):
        """Returns the exit code and what was said."""
        monkeypatch.setenv("HPLM_ADMIN", secret)
        code, said = main(["watch", "--url", url, *options]), capsys.readouterr()
        assert bool(code) == bool(said.err) and said.err.count("\n") <= 1
        return code, said.err or said.out

    code, said = watch("--once")
    assert code == 0 and mentions(said, len(control.probes(control.models())))
    assert watch("--once", "--models", "toy-lookup", watched.upper, secret="")[0] == 0
    for options, given, named in (
        ((), {"url": "127.0.0.1:1"}, ["127.0.0.1:1", "--url"]),
        ((), {"secret": ""}, ["HPLM_ADMIN"]),
        (("--models", "nobody"), {}, ["nobody"]),
    ):
        code, said = watch("--once", *options, **given)
        assert code == 1 and mentions(said, *named)
    assert control.revive("toy-lookup")  # a watcher that is started later does not know of it
    eventually(lambda: sum(stub.model == "toy-lookup" for stub in stubs(server.pid)) == 1)
    watched.kill_idle("toy-lookup")
    code, said = watch("--once")
    assert code == 1 and mentions(said, "toy-lookup")
    command = [sys.executable, "-m", "hplm.cli.main", "watch", "--url", server.http_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:  # the secret is in the environment
        assert mentions(watching.stdout.readline(), "loaded", "toy-lookup")
        watching.kill()
    assert watch("--once")[0] == 0


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


@pytest.mark.server("group", stops=True)
def test_while_a_server_stops_clients_meet_their_answer_or_draining_or_a_closed_connection(server):
    """Of both backbones and over both protocols, each by itself. Triton would wait for an idle connection."""
    idle = http.client.HTTPConnection(server.http_url, timeout=PATIENCE)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    ending, met = threading.Event(), {(backbone, protocol): Counter() for backbone in NAMES for protocol in LIBRARIES}

    def ask_on(backbone, protocol):
        stock, own = server.stock(protocol), met[backbone, protocol]
        while not ending.is_set() and own["closed"] < 100:
            own[outcome(stock, backbone)] += 1

    with ThreadPoolExecutor(2 * len(met)) as pool:
        asking = [pool.submit(ask_on, *way) for way in [*met] * 2]
        try:
            eventually(lambda: all(own["answered"] > 20 for own in met.values()))
            server.server.stop()
        finally:
            ending.set()
        for one in asking:
            one.result(timeout=PATIENCE)
    assert all(set(own) <= {"answered", "draining", "closed"} for own in met.values()), met
    assert all(sum(met[way]["draining"] for way in met if way[1] == protocol) for protocol in LIBRARIES), met
    assert "Waiting for in-flight requests" not in server.server.log_file.read_text(), "Triton has waited"
    idle.close()
