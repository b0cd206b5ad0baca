"""The engine's process is killed under a real server: every open request is answered, and a new engine serves."""

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from hplm.server import process_group
from testing.toy import WORDS
from tests.server.stock import LIBRARIES, Stock
from tests.serving import serving

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
