"""Requests that the model `hplm` has forwarded are refused at once when lookup's line is full, others later."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

import backends
from builder.publish.model_configs import ALIAS
from hplm.server.held import holders
from hplm.tenants.arrival import FORWARDED
from testing.toy import WORDS
from tests.server.stock import LIBRARIES, Stock
from tests.support.servers import serving
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

PLACES, REFUSED = 2, 4
FORGED = ["", "1", "0" * 64, True, 1]  # the real one is 32 random bytes in hexadecimal
# Follows the code of lookup. Its line is short, it reads nothing while a file is there, and keeps refusals until it reads.
GATED = """
from hplm.engine import lookup_service
from hplm.scheduling.limits import Limits

lookup_service.WAITING = Limits(items={places}, work=1 << 20)
lookup_service.LEAST_PAUSE = lookup_service.LONGEST_PAUSE = 1e6
HeldBy.count = property(lambda self: lookup_service.MOST_AHEAD if Path({gate!r}).exists() else 0)
"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("gated") / "gate"


@pytest.fixture(scope="module")
def server(toy, gate):
    gated = shutil.copytree(Path(backends.__file__).parent, gate.with_name("backends"))
    with open(gated / "hplm_lookup/model.py", "a") as lookup:
        lookup.write(GATED.format(places=PLACES, gate=str(gate)))
    with serving(toy.repository, backends=gated) as server:
        yield server


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_forwarded_requests_are_refused_before_a_request_is_looked_up(server, gate, protocol):
    stock = Stock(server, protocol)

    def ask(model="toy", **parameters):
        try:
            return stock.ask([WORDS[0]], "acme", outputs=("LABEL",), model=model, **parameters)["LABEL"].shape
        except InferenceServerException as error:
            assert "[queue_full]" in error.message(), error
            return "refused"

    def in_lookup():
        return sum(holder.held for holder in holders(server.id) if holder.model == "toy-lookup")

    gate.touch()
    answered = ask()  # the thread that looks up had begun to wait for it before the file was there
    with ThreadPoolExecutor(32) as pool:
        try:
            waiting = [pool.submit(ask) for _ in range(PLACES)]
            eventually(lambda: in_lookup() == PLACES)
            kept = [pool.submit(ask) for _ in range(REFUSED)] + [pool.submit(ask, **{FORWARDED: forged}) for forged in FORGED]
            eventually(lambda: in_lookup() == len(waiting + kept))
            forwarded = [pool.submit(ask, ALIAS, **parameters) for parameters in [{}] * REFUSED + [{FORWARDED: "1"}]]
            assert {one.result(PATIENCE) for one in forwarded} == {"refused"}
            assert not any(one.done() for one in waiting + kept)
            eventually(lambda: in_lookup() == len(waiting + kept))  # an answer is counted when it was sent
        finally:
            gate.unlink()
        assert {one.result(PATIENCE) for one in waiting} == {answered}
        assert {one.result(PATIENCE) for one in kept} == {"refused"}
