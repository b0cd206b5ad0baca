"""The engine of a group on a real Triton: it serves two backbones. When it ends, every open request is answered."""

import os
import signal

import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.errors import error_in
from hplm.plot.table import Table
from testing.random_store import SPECIAL
from testing.toy import WORDS
from tests.backbones import NAMES
from tests.server.asking import Asking
from tests.support.answers import Comparison
from tests.support.metrics import Scraped
from tests.support.servers import engine_of
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("group")]

TEXT = " ".join(WORDS[:9])


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
        return Scraped(server).of(f"hplm_{name}", backbone="toy")

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


def test_new_tenants_of_both_backbones_are_served_and_counted_for_each(server):
    stock, comparison = server.stock(), Comparison()
    for backbone in NAMES:
        new = server.tenant(backbone).id
        counted = Scraped(server).of("hplm_batch_texts_total", backbone=backbone)
        expected = server.reference(backbone).forward(TEXT, new).numpy()
        for model in (backbone, "hplm"):
            comparison.add(f"{backbone}/{new}", stock.ask([TEXT], new, model=model)["LOGITS"][0][: len(expected)], expected)
        eventually(lambda own=backbone, at=counted: Scraped(server).of("hplm_batch_texts_total", backbone=own) >= at + 2)
    comparison.assert_equal("fp32")
