"""The engine's process is killed under a real server: every open request is answered, and a new engine serves."""

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.engine.in_flight import read
from hplm.errors import error_in
from hplm.server import process_group
from testing.toy import WORDS
from tests.server.asking import Asking
from tests.server.stock import LIBRARIES, Stock
from tests.support.servers import published, serving
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

IN_FLIGHT = 100


def engine_of(server):
    """Returns the process id of the server's engine."""
    for pid in process_group.members(server.pid):
        if b"hplm.engine.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_every_request_in_flight_is_answered(toy, protocol):
    with serving(toy.repository) as server:
        stock = Stock(server, protocol)

        def ask(_):
            try:
                return stock.ask([" ".join(WORDS[:9])] * 4, "acme", outputs=("LABEL",))["LABEL"].shape
            except InferenceServerException as error:
                return error.status(), "[draining]" in error.message()

        expected = ask(0)
        killed = engine_of(server)
        os.kill(killed, signal.SIGSTOP)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = [pool.submit(ask, number) for number in range(IN_FLIGHT)]
            time.sleep(1)  # so that most of them are on their way
            os.kill(killed, signal.SIGKILL)
            said = Counter(answer.result(timeout=60) for answer in answers)
        assert said.total() == IN_FLIGHT
        refused = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}[protocol]
        assert set(said) <= {expected, (refused, True)} and said[refused, True] > 0
        until = time.monotonic() + 60
        while ask(0) != expected:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert engine_of(server) not in (None, killed)


@contextmanager
def poisoned(server, tenant):
    """Kills each engine that computes texts of this tenant, as one of them might do."""
    ending = threading.Event()

    def computes(batches):
        return tenant in {mark.tenant_id for mark in read(batches)}

    def stands_still(pid):
        return all(" T " in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))

    def end_engines():
        while not ending.is_set():
            with suppress(OSError):  # it has just ended
                if (pid := engine_of(server)) is None:
                    continue
                shown = next(fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "hplm-batches" in os.readlink(fd))
                with open(shown, "rb", buffering=0) as batches:
                    while not ending.is_set() and process_group.lives(pid):
                        if computes(batches.fileno()):
                            os.kill(pid, signal.SIGSTOP)  # otherwise it might finish that batch before it is killed
                            eventually(lambda: stands_still(pid))
                            os.kill(pid, signal.SIGKILL if computes(batches.fileno()) else signal.SIGCONT)

    thread = threading.Thread(target=end_engines)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@pytest.fixture
def release(toy):
    """The command that releases the tenant `acme`. It runs at the end in any case, because other tests ask that tenant."""
    command = ["tenant", "release", "acme", "--repository", str(toy.repository)]
    yield command
    main(command)


def test_a_tenant_whose_texts_end_the_engine_is_quarantined_and_others_are_served(toy, release):
    with serving(toy.repository) as server:
        stocks = {protocol: Stock(server, protocol) for protocol in LIBRARIES}

        def said_to(tenant, texts=1):
            """Returns the word of the error that a tenant gets, None for an answer."""
            try:
                stocks["http"].ask([" ".join(WORDS[:9])] * texts, tenant)
            except InferenceServerException as error:
                return error_in(error.message()).word

        def said_until_quarantined():
            """An engine may have answered before it is found to compute, so that there are answers too."""
            said = []
            eventually(lambda: said.append(said_to("acme", 1000)) or said[-1] == "quarantined")
            assert set(said) <= {None, "crashed", "draining", "quarantined"}
            return said

        with Asking(stocks.get, ["beta", "city"], WORDS[:5]) as others, poisoned(server, "acme"):
            said = said_until_quarantined()
            others.wait_for(lambda tenant, text, answer: not isinstance(answer, Exception), 50)
        assert said.count("crashed") == 2
        assert {error_in(str(error)).word for error in others.failures()} <= {"crashed", "draining"}
        eventually(lambda: published(server, "hplm_quarantined_tenants") == 1)
        assert published(server, "hplm_engine_restarts_total") == 2
        assert published(server, "hplm_lost_requests_total", outcome="crashed") >= 2
        assert main(release) == 0
        eventually(lambda: said_to("acme") is None)
        with poisoned(server, "acme"):
            assert said_until_quarantined().count("crashed") == 1  # it was still suspected
