"""A group of a placement on a real Triton: one engine for two backbones. Its answers: `tests/answers/test_ways.py`."""

import pytest

from builder.store.store import TenantFile
from hplm.server.stubs import stubs
from hplm_client import HplmClient
from testing.toy import TENANTS, WORDS
from tests.backbones import NAMES
from tests.server.asking import Asking
from tests.server.stock import refused
from tests.support.answers import Comparison

pytestmark = [pytest.mark.slow, pytest.mark.server("group")]
TEXT = " ".join(WORDS[:12])


def test_one_engine_serves_both_backbones_and_no_tenant_of_another_group(server):
    assert sum(stub.model.endswith("-upper") for stub in stubs(server.server.pid)) == 1
    with HplmClient(server.http_url) as client:
        assert client.backbones() == sorted(NAMES)
    for tenant in (tenant.id for tenant in TENANTS if tenant.domain == "law"):
        for model in (*NAMES, "hplm"):
            with refused("no_tenant"):
                server.stock().ask([TEXT], tenant, model=model)


def test_a_tenant_is_added_to_one_while_the_other_is_asked(server):
    stock, comparison = server.stock(), Comparison()

    def compare(backbone, tenant, answers):
        expected = server.reference(backbone).forward(TEXT, tenant).numpy()
        for answer in answers:
            comparison.add(f"{backbone}/{tenant}", answer["LOGITS"][0][: len(expected)], expected)

    with Asking(server.stock, ["gaia"], [TEXT], clients=1) as load:
        new = server.tenant("deep", file=TenantFile("new", 1, "root", 1, "classify", ["x", "y"], 4)).id
        compare("deep", new, [stock.ask([TEXT], new, model=model) for model in ("deep", "hplm")])
        load.wait_for(lambda *answer: True, 3)
    assert not load.failures()
    compare("toy", "gaia", [answer for _, _, answer in load.answers])
    comparison.assert_equal("fp32")
