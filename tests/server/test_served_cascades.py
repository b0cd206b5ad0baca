"""Tenants with a ladder behind a real Triton: each rung gives the reference's answers, levels and confidences."""

from __future__ import annotations

import itertools
import json
import random
import urllib.request
from collections import Counter

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.model_configs import ALIAS
from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup
from hplm.levels.plan import Plan, Step
from testing.reference import Reference
from tests.climb import Climb
from tests.ladders import EARLY, OWN, PRUNING, make_ladders
from tests.server.stock import LIBRARIES, Stock
from tests.support.answers import Comparison
from tests.support.message import mentions
from tests.support.metrics import Scraped, settled
from tests.support.servers import serving
from tests.support.wait import eventually
from tests.tasks import TENANTS, question

pytestmark = pytest.mark.slow

OUTPUTS = ("LABEL", "LOGITS", "LEVEL", "CONFIDENCE")
SOME = Plan((Step(0, slope=1.0), Step(1, weight=0.6)))  # of each task about half of the texts go on
LADDER = (OWN, SOME, PRUNING, EARLY)
STATUS = {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"}


@pytest.fixture(scope="module")
def ladders(tmp_path_factory):
    return make_ladders(tmp_path_factory.mktemp("ladders"), LADDER)


@pytest.fixture(scope="module")
def server(ladders):
    with serving(ladders.repository) as server:
        yield server


@pytest.fixture(scope="module")
def asked(ladders):
    """Returns requests, each with its tenant, rung, texts and pairs, and the climb of each text."""
    reference, lookup, rng = Reference.open(ladders.folder), Lookup(Backbone(ladders.folder)), random.Random(6)
    found = []
    for tenant in TENANTS:
        for rung, plan in enumerate(LADDER, 1):
            texts, pairs = zip(*(question(rng, tenant.task) for _ in range(3)), strict=True)
            if tenant.task == "span":
                pairs = [" ".join(pair.split()[:30]) for pair in pairs]  # in one window
            climbs = [Climb(reference, tenant.id, *both, plan, lookup) for both in zip(texts, pairs, strict=True)]
            found.append((tenant, rung, texts, pairs if pairs[0] is not None else None, climbs))
    assert sum(climb.is_close for *_, climbs in found for climb in climbs) < 8
    assert {(rung, climb.level) for _, rung, *_, climbs in found for climb in climbs if not climb.is_close} == {
        *((1, 2), (2, 1), (2, 2), (3, 2), (4, 1))
    }
    return found


@pytest.mark.parametrize("model", ["toy", ALIAS])
@pytest.mark.parametrize("protocol", LIBRARIES)
def test_each_rung_gives_the_answers_of_the_reference(server, asked, protocol, model):
    stock, comparison = Stock(server, protocol), Comparison()
    for tenant, rung, texts, pairs, climbs in asked:
        answer = stock.ask(texts, tenant.id, pairs, OUTPUTS, model, hplm_rung=rung)
        assert answer["LEVEL"].shape == (len(texts), 1) and answer["LEVEL"].dtype == np.int32
        for i, climb in enumerate(climbs):
            if climb.is_close:
                continue
            assert answer["LEVEL"][i, 0] == climb.level, (tenant.id, rung)
            assert answer["CONFIDENCE"][i, 0] == pytest.approx(climb.confidence, abs=1e-3)
            logits = climb.answer.logits
            comparison.add(tenant.id, answer["LOGITS"][i, : len(logits)], logits)
            if tenant.task != "regress":
                labels = [label.decode() for label in answer["LABEL"][i]]
                assert labels[: len(climb.answer.labels)] == climb.answer.labels
    comparison.assert_equal("fp32")


def test_without_a_rung_a_quiet_server_takes_the_dearest_plan_and_sends_the_level_in_json(server):
    body = {
        "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [2, 1], "data": ["a b", "c"]}],
        "parameters": {"tenant": "many"},
    }
    for model in ("toy", ALIAS):
        request = urllib.request.Request(f"http://{server.http_url}/v2/models/{model}/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            (level,) = [output for output in json.load(answer)["outputs"] if output["name"] == "LEVEL"]
        assert (level["datatype"], level["shape"], level["data"]) == ("INT32", [2, 1], [2, 2])


@pytest.mark.parametrize("model", ["toy", ALIAS])
@pytest.mark.parametrize("protocol", LIBRARIES)
def test_a_rung_out_of_range_is_refused_and_counted(server, protocol, model):
    stock, before = Stock(server, protocol), _refused(server)
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(["a b"], "pair", outputs=["LABEL"], model=model, hplm_rung=5)
    assert caught.value.status() == STATUS[protocol]
    assert mentions(caught.value.message(), "[invalid_input]", "hplm_rung", "5", "'pair'", "1 to 4")
    eventually(lambda: _refused(server) == before + 1)
    assert stock.ask(["a b"], "pair", outputs=["LEVEL"], model=model, hplm_rung=4)["LEVEL"].tolist() == [[1]]


def _refused(server):
    return Scraped(server).of("hplm_lookup_requests_total", outcome="invalid_input")


def test_levels_are_counted_with_the_reason(server):
    before, stock = _counted(settled(server, {})), Stock(server, "http")
    texts = [question(random.Random(3), "multilabel")[0] for _ in range(2)]
    for rung in range(1, len(LADDER) + 1):
        stock.ask(texts, "many", outputs=["LABEL"], hplm_rung=rung)
    eventually(lambda: (_counted(Scraped(server)) - before).total() == 2 * len(LADDER))
    found = _counted(Scraped(server)) - before
    assert found["2", "only"] == found["1", "only"] == 2 and found["2", "last"] >= 2


def _counted(scraped):
    metric = "hplm_level_texts_total"
    pairs = itertools.product(("1", "2"), ("only", "sure", "last"))
    return Counter({(level, reason): int(scraped.of(metric, level=level, reason=reason)) for level, reason in pairs})
