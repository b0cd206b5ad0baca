"""The groups of a placement on real Tritons: each answers for its tenants as the reference does, and knows no others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.groups import emit
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.snapshot import Snapshot
from testing.toy import CONFIG, TENANTS, WORDS
from tests.server.stock import Stock
from tests.support.answers import Comparison
from tests.support.servers import serving

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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two stages take two cores")
def test_a_group_of_two_stages_answers_as_the_reference_does(toy, reference, tmp_path):
    """Many requests come at once, so that batches are in both stages."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    cut = {"toy": ((0, 0), (1, CONFIG.upper_layers - 1))}
    placed = Group("one", "m0", tuple(f"cpu:{core}" for core in cores), 1, cut, tuple(unit.name for unit in UNITS))
    export = Snapshot.load(toy.folder / "tenants.json").export
    placement = Placement((placed,), UNITS, {"toy": "fp32"}, {"toy": export}, "a cluster", "a profile")
    emit(placement, toy.repository, tmp_path / "groups")
    asked = [(tenant.id, " ".join(WORDS[n : n + 1 + n % 12])) for n in range(6) for tenant in TENANTS]
    comparison = Comparison()
    with serving(tmp_path / "groups/one") as server:
        stock = Stock(server, "grpc")
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda own: stock.ask([own[1]], own[0])["LOGITS"][0], asked))
        for (tenant, text), logits in zip(asked, found, strict=True):
            expected = reference.forward(text, tenant).numpy()
            comparison.add(tenant, logits[: len(expected)], expected)
    comparison.assert_equal("fp32")


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
