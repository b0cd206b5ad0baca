"""A group of a placement on a real Triton: one engine answers for two backbones, also while tenants change and if it ends."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from builder.store.store import TenantFile
from hplm.server.stubs import stubs
from hplm_client import HplmClient
from testing.toy import TENANTS, WORDS
from tests.backbones import NAMES
from tests.server.asking import Asking
from tests.server.stock import LIBRARIES
from tests.support.answers import Comparison
from tests.support.servers import published
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("group")]
TEXT = " ".join(WORDS[:12])
PLACED = [tenant.id for tenant in TENANTS if tenant.domain != "law"]


def compared(server, found):
    """`found`: the logits, by a backbone, a tenant and a text."""
    comparison, known = Comparison(), {}
    for asked, logits in found:
        name, tenant, text = asked
        if asked not in known:
            known[asked] = server.reference(name).forward(text, tenant).numpy()
        expected = known[asked]
        comparison.add(f"{name}/{tenant}", logits[: len(expected)], expected)
    comparison.assert_equal("fp32")


def test_one_engine_of_two_stages_answers_for_both_backbones_and_for_no_tenant_of_another_group(server):
    """Many requests come at once, so that batches are in both stages."""
    assert sum(stub.model.endswith("-upper") for stub in stubs(server.server.pid)) == 1
    stocks = [server.stock(protocol) for protocol in LIBRARIES]
    asked = [(name, tenant, " ".join(WORDS[n : n + 1 + n % 12])) for n in range(4) for tenant in PLACED for name in NAMES]
    random.Random(0).shuffle(asked)
    with ThreadPoolExecutor(8) as clients:
        numbered = clients.map(lambda one: stocks[one[0] % 2].ask([one[1][2]], one[1][1], model=one[1][0]), enumerate(asked))
        found = [answer["LOGITS"][0] for answer in numbered]
    compared(server, zip(asked, found, strict=True))
    with HplmClient(server.http_url) as client:
        assert client.backbones() == sorted(NAMES)
    eventually(lambda: all(published(server, "hplm_requests_total", backbone=name) >= len(asked) / 2 for name in NAMES))
    for tenant in (tenant.id for tenant in TENANTS if tenant.domain == "law"):
        for model in (*NAMES, "hplm"):
            with pytest.raises(InferenceServerException, match="no_tenant"):
                stocks[0].ask([TEXT], tenant, model=model)


def test_a_tenant_is_added_to_one_while_the_other_is_asked(server):
    stock = server.stock()
    with Asking(server.stock, ["gaia"], [TEXT], clients=1) as load:
        new = server.tenant("deep", file=TenantFile("new", 1, "root", 1, "classify", ["x", "y"], 4)).id

        def compare():
            models = {"deep": "deep", "hplm": "deep"}
            compared(server, [((name, new, TEXT), stock.ask([TEXT], new, model=model)["LOGITS"][0])
                              for model, name in models.items()])  # fmt: skip

        compare()
        load.wait_for(lambda *answer: True, 3)
    assert not load.failures()
    compared(server, [(("toy", "gaia", TEXT), answer["LOGITS"][0]) for _, _, answer in load.answers])
