"""Texts that go on to another level and to another backbone behind a real Triton: a short look, until exits replace both."""

import random

import numpy as np
import pytest

from builder.publish.model_configs import ALIAS
from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup
from tests.links import FAR, Crossing
from tests.support.answers import Comparison
from tests.tasks import question


class _Reading:
    """Looks texts up as for requests that may follow the link."""

    def __init__(self, folder):
        self._lookup = Lookup(Backbone(folder))

    def resolve(self, view, tenant, texts, pairs):
        return self._lookup.resolve(view, tenant, texts, pairs, link=tenant.link)


@pytest.mark.slow
@pytest.mark.server("precisions")
def test_the_alias_answers_from_each_level_and_backbone_as_the_references_do(server):
    near, far, lookup = server.reference("toy"), server.reference(FAR), _Reading(server.model_folder("toy"))
    rng, levels, comparison = random.Random(4), set(), Comparison()
    for tenant in ("many", "mark", "word"):
        task = near.backbone.view.snapshot.find(tenant).task
        texts, pairs = zip(*(question(rng, task) for _ in range(8)), strict=True)
        asked = texts, tenant, pairs if pairs[0] is not None else None, ("LEVEL", "LOGITS", "CONFIDENCE")
        answer = server.stock("grpc").ask(*asked, ALIAS)
        fixed = server.stock("http").ask(*asked, ALIAS, hplm_rung=1)
        assert (fixed["LEVEL"] == 2).all(), "a request with a rung stays in its backbone"
        for i, both in enumerate(zip(texts, pairs, strict=True)):
            one = Crossing(near, far, tenant, *both, lookup)
            if one.is_close:
                continue
            levels.add(one.level)
            assert answer["LEVEL"][i, 0] == one.level
            assert answer["CONFIDENCE"][i, 0] == pytest.approx(one.confidence, abs=1e-3)
            logits = np.asarray(one.answer.logits)
            comparison.add(tenant, answer["LOGITS"][i, : len(logits)], logits)
    comparison.assert_equal("fp32")
    assert levels >= {1, 3} or levels >= {2, 3}, "all texts end in one backbone"
