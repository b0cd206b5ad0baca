"""The engine of a group on a real Triton: it serves two backbones. When it ends, every open request is answered."""

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.errors import error_in
from hplm.plot.table import Table
from hplm.server import process_group
from hplm.server.stubs import stubs
from hplm_client import HplmClient
from testing.random_store import SPECIAL
from testing.toy import TENANTS, WORDS
from tests.backbones import NAMES
from tests.server.asking import Asking
from tests.server.stock import LIBRARIES, refused
from tests.support.answers import Comparison
from tests.support.servers import published
from tests.support.wait import PATIENCE, eventually, stop

pytestmark = [pytest.mark.slow, pytest.mark.server("group")]

IN_FLIGHT = 100
TEXT = " ".join(WORDS[:9])
REFUSED = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}


def engine_of(server, model=None):
    """Returns the process id of an engine of the server, or of that of a model."""
    owners = {stub.pid for stub in stubs(server.pid) if model in (None, stub.model)}
    for pid in process_group.members(server.pid):
        if "hplm.engine.child" in process_group.arguments(pid) and _parent(pid) in owners:
            return pid
    return None


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return None


def test_every_request_in_flight_is_answered(server):
    stocks = [server.stock(protocol) for protocol in LIBRARIES]

    def ask(number):
        stock = stocks[number % 2]
        try:
            return stock.ask([TEXT] * 4, "acme", outputs=("LABEL",))["LABEL"].shape
        except InferenceServerException as error:
            return error.status() == REFUSED[stock.protocol] and "[draining]" in error.message()

    expected = ask(0)
    assert expected == ask(1) == (4, 1)
    killed = engine_of(server.server)
    stop(killed)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        answers = [pool.submit(ask, number) for number in range(IN_FLIGHT)]
        eventually(lambda: server.held >= IN_FLIGHT // 4)
        os.kill(killed, signal.SIGKILL)
        said = Counter(answer.result(timeout=PATIENCE) for answer in answers)
    assert said.total() == IN_FLIGHT and set(said) <= {expected, True} and said[True] > 0
    eventually(lambda: ask(0) == ask(1) == expected)
    assert stocks[0].ask([TEXT], "acme", outputs=("LABEL",), model="deep")["LABEL"].size  # the engine's other backbone
    assert engine_of(server.server) not in (None, killed)


def test_a_tenant_whose_texts_end_the_engine_is_quarantined_and_others_are_served(server):
    """Its table is cut while it is mapped, so that reading a row ends the process with SIGBUS. Takes long: four engines."""
    stock, release = server.stock(), ["tenant", "release", "acme", "--repository", str(server.repository)]
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

    def end_engine_by_its_texts():
        eventually(lambda: said_to("beta") is None)
        os.truncate(values, 0)
        try:
            return said_to("acme")
        finally:
            values.open("r+b").write(content)

    def counted(name):
        return published(server, f"hplm_{name}", backbone="toy")

    restarts, lost = counted("engine_restarts_total"), counted("lost_requests_total")
    try:
        with Asking(server.stock, ["beta", "echo"], WORDS[:5]) as others:
            assert [end_engine_by_its_texts() for _ in range(2)] == ["crashed", "crashed"]
            eventually(lambda: said_to("acme") == "quarantined")
            others.wait_for(lambda tenant, text, answer: not isinstance(answer, Exception), 50)
        assert {error_in(str(error)).word for error in others.failures()} <= {"crashed", "draining"}
        eventually(lambda: counted("quarantined_tenants") == 1)
        assert counted("engine_restarts_total") == restarts + 2
        assert counted("lost_requests_total") >= lost + 2
        assert main(release) == 0
        eventually(lambda: said_to("acme") is None)
        killed = engine_of(server.server)
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: engine_of(server.server) not in (None, killed))
        assert end_engine_by_its_texts() == "crashed"
        eventually(lambda: said_to("acme") == "quarantined")  # at once: it was still suspected
    finally:
        main(release)
    eventually(lambda: said_to("acme") is None)


def test_one_engine_serves_both_backbones_and_their_new_tenants_and_none_of_another_group(server):
    stock, comparison = server.stock(), Comparison()
    assert sum(stub.model.endswith("-upper") for stub in stubs(server.server.pid)) == 1
    with HplmClient(server.http_url) as client:
        assert client.backbones() == sorted(NAMES)
    for tenant in (tenant.id for tenant in TENANTS if tenant.domain == "law"):
        for model in (*NAMES, "hplm"):
            with refused("no_tenant"):
                stock.ask([TEXT], tenant, model=model)
    for backbone in NAMES:
        new = server.tenant(backbone).id
        expected = server.reference(backbone).forward(TEXT, new).numpy()
        for model in (backbone, "hplm"):
            comparison.add(f"{backbone}/{new}", stock.ask([TEXT], new, model=model)["LOGITS"][0][: len(expected)], expected)
    comparison.assert_equal("fp32")
