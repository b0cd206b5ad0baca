"""The engine's process ends under a real server: every open request is answered, and a new engine serves."""

import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.cli.main import main
from hplm.errors import error_in
from hplm.server import process_group
from testing.toy import WORDS
from tests.server.asking import Asking
from tests.server.stock import LIBRARIES, Stock
from tests.support.servers import held, published, serving
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

IN_FLIGHT = 100
TEXT = " ".join(WORDS[:9])
REFUSED = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}
LONG = [" ".join(np.random.default_rng(seed).choice(WORDS, 300)) for seed in range(400)]
LONGS, SHORTS = 7, 3


def engine_of(server):
    """Returns the process id of the server's engine."""
    for pid in process_group.members(server.pid):
        if "hplm.engine.child" in process_group.arguments(pid):
            return pid
    return None


@pytest.fixture(scope="module")
def repository(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    export(toy.store, folder / "repository", ServingOptions(dtype="fp32", slots=4, journal=str(folder / "journal.jsonl")))
    return folder / "repository"


@pytest.fixture(scope="module")
def server(repository):
    with serving(repository) as server:
        yield server


def test_every_request_in_flight_is_answered(server):
    stocks = [Stock(server, protocol) for protocol in LIBRARIES]

    def ask(number):
        stock = stocks[number % 2]
        try:
            return stock.ask([TEXT] * 4, "acme", outputs=("LABEL",))["LABEL"].shape
        except InferenceServerException as error:
            return error.status() == REFUSED[stock.protocol] and "[draining]" in error.message()

    expected = ask(0)
    assert expected == ask(1) == (4, 1)
    killed = engine_of(server)
    os.kill(killed, signal.SIGSTOP)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        answers = [pool.submit(ask, number) for number in range(IN_FLIGHT)]
        eventually(lambda: held(server) >= IN_FLIGHT // 4)
        os.kill(killed, signal.SIGKILL)
        said = Counter(answer.result(timeout=PATIENCE) for answer in answers)
    assert said.total() == IN_FLIGHT and set(said) <= {expected, True} and said[True] > 0
    eventually(lambda: ask(0) == ask(1) == expected)
    assert engine_of(server) not in (None, killed)


@pytest.fixture
def release(repository):
    """The command that releases the tenant `hugo`. It runs at the end in any case."""
    command = ["tenant", "release", "hugo", "--repository", str(repository)]
    yield command
    main(command)


def test_a_tenant_whose_texts_end_the_engine_is_quarantined_and_others_are_served(server, repository, release):
    """Its bank is cut while it is mapped, so that reading a record ends the process with SIGBUS. Takes long: four engines."""
    stocks = {protocol: Stock(server, protocol) for protocol in LIBRARIES}
    banks = [path for path in repository.rglob("*.bank") if "bottleneck" in path.name and "bf16" in path.name]
    (bank,) = banks
    content = bank.read_bytes()

    def said_to(tenant):
        """Returns the word of the error that a tenant gets, None for an answer."""
        try:
            stocks["http"].ask([TEXT], tenant)
        except InferenceServerException as error:
            return error_in(error.message()).word

    def end_engine_by_its_texts():
        """The engine must not have read the tenant's record before."""
        eventually(lambda: said_to("beta") is None)
        os.truncate(bank, 4096)
        try:
            return said_to("hugo")
        finally:
            bank.open("r+b").write(content)

    restarts, lost = (published(server, name) for name in ("hplm_engine_restarts_total", "hplm_lost_requests_total"))
    with Asking(stocks.get, ["beta", "city"], WORDS[:5]) as others:
        assert [end_engine_by_its_texts() for _ in range(2)] == ["crashed", "crashed"]
        eventually(lambda: said_to("hugo") == "quarantined")
        others.wait_for(lambda tenant, text, answer: not isinstance(answer, Exception), 50)
    assert {error_in(str(error)).word for error in others.failures()} <= {"crashed", "draining"}
    eventually(lambda: published(server, "hplm_quarantined_tenants") == 1)
    assert published(server, "hplm_engine_restarts_total") == restarts + 2
    assert published(server, "hplm_lost_requests_total") >= lost + 2
    assert main(release) == 0
    eventually(lambda: said_to("hugo") is None)
    killed = engine_of(server)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: engine_of(server) not in (None, killed))
    assert end_engine_by_its_texts() == "crashed"
    eventually(lambda: said_to("hugo") == "quarantined")  # at once: it was still suspected


def test_a_request_that_waits_for_lookup_has_arrived(server, repository):
    """Deadlines count from the time at which Triton handed a request over, not from the time at which lookup got round to it.

    Requests of one tenant are looked up in order, so that most of these have arrived before the one ahead is looked up.
    """
    stock, parameters = Stock(server, "http"), {"tenant": "acme", "truncate": True}
    eventually(lambda: held(server) == 0)
    requests = {f"long-{number}": LONG for number in range(LONGS)} | {f"short-{number}": LONG[:1] for number in range(SHORTS)}
    connected = threading.Barrier(len(requests))

    def ask(name):
        text = stock.tensor("TEXT", np.array([[text.encode()] for text in requests[name]], dtype=object))
        stock.client.is_server_live()
        connected.wait(PATIENCE)
        stock.client.infer("toy", [text], request_id=name, parameters=parameters, timeout=600_000_000)

    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(ask, requests))
    journal = repository.with_name("journal.jsonl")

    def entries():
        return [found for found in map(json.loads, journal.read_text("utf-8").splitlines()) if found.get("request") in requests]

    eventually(lambda: len(entries()) == len(requests))
    in_order = sorted(entries(), key=lambda entry: entry["taken"])
    before = sum(entry["arrived"] < ahead["taken"] for ahead, entry in pairwise(in_order))
    assert before > len(requests) / 2, in_order
    for entry in in_order:
        assert entry["outcome"] == ("on_time" if entry["answered"] <= entry["deadline"] else "late")
