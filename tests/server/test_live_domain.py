"""A domain changes under load on a real Triton: every answer is that of the old or the new version, and none is lost."""

import random
from dataclasses import replace

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.live import add_domain, update_domain
from builder.publish.model_configs import ServingOptions
from hplm.tenants.manager import Manager
from testing.random_store import random_store, random_table, random_tenant, random_tenants
from testing.reference import Reference
from testing.toy import CONFIG, random_text
from tests.server.asking import Asking
from tests.server.stock import Stock
from tests.support.answers import Comparison
from tests.support.metrics import settled
from tests.support.servers import serving

pytestmark = pytest.mark.slow

TENANTS = random_tenants(6, 4, 3, domains=("bio",))
TEXTS = [random_text(random.Random(seed), 40) for seed in range(5)]


@pytest.fixture
def place(tmp_path):
    store = random_store(tmp_path / "store", CONFIG, TENANTS, ("bio",), corpus_tokens=3000, spread=0.3)
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256, plot_preload=True))
    return store, tmp_path / "repository", tmp_path / "state"


def asking(server):
    return Asking(lambda protocol: Stock(server, protocol), [tenant.id for tenant in TENANTS], TEXTS)


def version_of(answer):
    """Returns the version of an answer. A version number is never used twice, so the second version returns as the third."""
    return min(2, int(answer["VERSION"][0, 0]))


def references(place):
    """Returns the allowed answers by tenant and version."""
    _, repository, state = place
    known = {}
    for where in (None, state):
        reference = Reference.open(repository / "toy/1", where)
        for tenant in reference.backbone.view.snapshot.tenants:
            for text in TEXTS:
                known[tenant.id, tenant.version, text] = reference.forward(text, tenant.id).numpy()
    return known


def test_every_answer_is_of_the_old_or_the_new_version_and_none_fails(place):
    """The server starts on a state that has changed before."""
    store, repository, state = place
    random_table(store, "law", 1, ("bio", 1), 1000, seed=5)
    add_domain(Manager.open(repository, state), store, "law")
    with serving(repository, state=state) as server, asking(server) as load:
        load.wait_for(lambda tenant, text, answer: version_of(answer) == 1)
        random_table(store, "bio", 2, ("root", 1), 3000, seed=77)
        for number, tenant in enumerate(TENANTS):
            random_tenant(store, replace(tenant, version=2, domain_version=2), 0.3, seed=500 + number)
        live = Manager.open(repository, state)
        canary = update_domain(live, store, "bio", share=0.34).moved
        assert len(canary) == 2
        load.wait_for(lambda tenant, text, answer: tenant in canary and version_of(answer) == 2)
        load.wait_for(lambda tenant, text, answer: tenant not in canary and version_of(answer) == 1)
        update_domain(live, store, "bio")
        load.wait_for(lambda tenant, text, answer: tenant not in canary and version_of(answer) == 2)
        both = references(place)
        live.roll_back_domain("bio")
        load.wait_for(lambda tenant, text, answer: version_of(answer) == 1)
        update_domain(live, store, "bio")
        load.wait_for(lambda tenant, text, answer: version_of(answer) == 2)
    assert not load.failures(), load.failures()[:3]
    comparison = Comparison()
    for tenant, text, answer in load.answers:
        version = version_of(answer)
        comparison.add(f"{tenant} version {version}", answer["LOGITS"][0], both[tenant, version, text])
    comparison.assert_equal("fp32")
    for tenant in TENANTS:
        for text in TEXTS:  # otherwise the comparison could not distinguish the versions
            assert np.abs(both[tenant.id, 1, text] - both[tenant.id, 2, text]).max() > 0.01


@pytest.mark.server("toy")
def test_hits_are_counted_by_table_and_length(server):
    chain = server.reference().backbone.view.forest.chain("bio", 1)
    before, stock = settled(server, {}), server.stock()
    for text in TEXTS:
        stock.ask([text], "acme")
    name = "hplm_plot_windows_total"
    scraped = settled(server, {name: sum(len(text.split()) + 2 for text in TEXTS)}, before)
    expected = {"domain": 0, "root": 0, "2-gram": 0, "1-gram": 0}
    tokenizer = server.built.stores["toy"].tokenizer()
    for text in TEXTS:
        hits = chain.lookup(tokens := tokenizer.encode(text).tokens, np.array([len(tokens)]))
        for level, link in zip(hits.levels.tolist(), hits.links.tolist(), strict=True):
            expected[("domain", "root")[link] if level == 0 else f"{3 - level}-gram"] += 1
    assert {level: scraped.of(name, backbone="toy", domain="bio", level=level) for level in expected} == expected
