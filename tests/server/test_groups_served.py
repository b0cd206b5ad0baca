"""The groups of a placement on real Tritons: each answers for its tenants as the reference does, and knows no others."""

from __future__ import annotations

import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.groups import emit
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.snapshot import Snapshot
from testing.toy import CONFIG, WORDS
from tests.equality import Comparison
from tests.server.stock import Stock
from tests.serving import serving

pytestmark = pytest.mark.slow
CUT = {"toy": ((0, CONFIG.upper_layers - 1),)}
UNITS = (Unit("toy/root", 3), Unit("toy/law", 2), Unit("toy/bio", 2), Unit("toy/bio/acme", 1))
TENANTS_OF = {"one": ["acme", "beta", "echo", "hugo"], "two": ["city", "dune", "flux", "gaia"]}
TEXT = " ".join(WORDS[:12])


@pytest.fixture(scope="module")
def groups(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("placed") / "groups"
    placed = (
        Group("one", "m0", ("cpu:0",), 1, CUT, ("toy/root", "toy/bio/acme")),
        Group("two", "m0", ("cpu:1",), 1, CUT, ("toy/law", "toy/bio")),
    )
    export = Snapshot.load(toy.folder / "tenants.json").export
    emit(Placement(placed, UNITS, {"toy": "fp32"}, {"toy": export}, "a cluster", "a profile"), toy.repository, folder)
    return folder


@pytest.mark.parametrize("name, others", [("one", "two"), ("two", "one")])
def test_a_group_answers_for_its_own_tenants_alone(groups, reference, name, others):
    comparison = Comparison()
    with serving(groups / name) as server:
        stock = Stock(server, "grpc")
        for tenant in TENANTS_OF[name]:
            expected = reference.forward(TEXT, tenant).numpy()
            found = stock.ask([TEXT], tenant)["LOGITS"][0, : len(expected)]
            comparison.add(tenant, found, expected)
            again = stock.ask([TEXT], tenant, model="hplm", outputs=["LOGITS"])["LOGITS"][0, : len(expected)]
            comparison.add(tenant, again, expected)
        for tenant in TENANTS_OF[others]:
            with pytest.raises(InferenceServerException, match="no_tenant"):
                stock.ask([TEXT], tenant)
    comparison.assert_equal("fp32")
