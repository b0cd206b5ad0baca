"""Links between tenants of two backbones behind a real Triton: served answers equal those of the references, step by step."""

from __future__ import annotations

import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.groups import gaps
from builder.publish.live import update_tenant
from builder.publish.model_configs import ALIAS
from builder.store.links import link_of, remove_link, save_link
from builder.store.store import Store
from hplm.engine.backbone import Backbone
from hplm.engine.lookup import Lookup
from hplm.server import process_group
from hplm.server.held import holders
from hplm.server.stubs import stubs
from hplm.tenants.keys import new_key
from hplm.tenants.link import Link
from hplm.tenants.manager import Manager
from testing.random_store import random_tenant
from testing.reference import Reference
from tests.backbones import emit_two, halved, placement_of_two, whole
from tests.links import FAR, FAR_IDS, PLANS, Crossing, make_linked, near_tenants
from tests.server.stock import LIBRARIES, Stock
from tests.support.answers import Comparison
from tests.support.metrics import Scraped, settled
from tests.support.servers import serving
from tests.support.wait import eventually
from tests.tasks import question

pytestmark = pytest.mark.slow

OUTPUTS = ("LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION")
SECRET, KEY = new_key()


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    # The tenant `pair` there has a key that no client knows: the link stands for it.
    settings = {"pair": {"keys": (KEY,)}, "word": {"deadline_us": 1}}  # of requests to the tenant `word` there
    return make_linked(tmp_path_factory.mktemp("linked"), settings=settings)


@pytest.fixture(scope="module")
def server(linked):
    with serving(linked.repository) as server:
        yield server


@pytest.fixture(scope="module")
def asked(linked):
    """Returns requests, each with its tenant, texts and pairs, and the crossing of each text."""
    near, far = (Reference.open(linked.model(store)) for store in (linked.near, linked.far))
    lookup, rng, found = _Reading(linked), random.Random(4), []
    for tenant in near_tenants():
        for _ in range(3):
            texts, pairs = zip(*(question(rng, tenant.task) for _ in range(5)), strict=True)
            crossings = [Crossing(near, far, tenant.id, *both, lookup) for both in zip(texts, pairs, strict=True)]
            found.append((tenant, texts, pairs if pairs[0] is not None else None, crossings))
    clear = [(tenant.id, one) for tenant, *_, ones in found for one in ones if not one.is_close]
    assert len(clear) > 50
    for tenant in near_tenants():
        levels = {one.level for name, one in clear if name == tenant.id}
        assert 3 in levels and len(levels) > 1, (tenant.id, levels)
    shortened = [(text, one) for _, texts, _, ones in found for text, one in zip(texts, ones, strict=True) if one.read]
    assert any(one.read[0] != text for text, one in shortened)
    return found


class _Reading:
    """Looks texts up as for requests that may follow the link."""

    def __init__(self, linked):
        self._lookup = Lookup(Backbone(linked.model(linked.near)))

    def resolve(self, view, tenant, texts, pairs):
        return self._lookup.resolve(view, tenant, texts, pairs, link=tenant.link)


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_answers_across_backbones_equal_those_of_the_references(server, asked, protocol):
    _assert_as_references(Stock(server, protocol), asked)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two stages take two cores")
@pytest.mark.parametrize("cut", [whole, halved])
def test_links_between_backbones_of_one_group_are_followed(linked, asked, tmp_path, cut):
    """Both have one engine, which gives texts back while it computes others of the other backbone."""
    cuts = cut(linked.near.config, linked.far.config)
    assert gaps(placement_of_two(linked.repository, ("cpu:0",), cuts), linked.repository) == []
    with serving(emit_two(linked.repository, tmp_path / "groups", cuts)) as server:
        assert sum(stub.model.endswith("-upper") for stub in stubs(server.pid)) == 1
        stock = Stock(server, "grpc")
        with ThreadPoolExecutor(4) as pool:
            for one in [pool.submit(_assert_as_references, stock, [one]) for one in asked]:
                one.result()


def _assert_as_references(stock, asked):
    comparison = Comparison()
    for tenant, texts, pairs, crossings in asked:
        answer = stock.ask(texts, tenant.id, pairs, OUTPUTS, ALIAS)
        for i, one in enumerate(crossings):
            if one.is_close:
                continue
            where, logits = (tenant.id, i), one.answer.logits
            assert answer["LEVEL"][i, 0] == one.level, where
            assert answer["CONFIDENCE"][i, 0] == pytest.approx(one.confidence, abs=1e-3), where
            comparison.add(tenant.id, answer["LOGITS"][i, : len(logits)], logits)
            count = len(one.answer.labels)
            np.testing.assert_array_equal(answer["SPAN"][i, :count], one.answer.spans)
            assert (answer["SPAN"][i, count:] == -1).all() and answer["VERSION"][i, 0] == b"1"
            np.testing.assert_allclose(answer["SCORE"][i, :count], one.answer.scores, atol=1e-3)
            if tenant.task != "regress":
                assert [label.decode() for label in answer["LABEL"][i, :count]] == one.answer.labels
    comparison.assert_equal("fp32")


def test_a_request_without_a_deadline_has_none_there_either(server, asked):
    stock = Stock(server, "http")
    _, texts, pairs, _ = next(one for one in asked if one[0].id == "word" and any(crossing.read for crossing in one[3]))
    assert stock.ask(texts, "word", pairs, ["LEVEL"], ALIAS)["LEVEL"].max() == 3
    with pytest.raises(InferenceServerException, match="deadline"):
        stock.ask(texts, "word", pairs, ["LEVEL"], FAR)


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_requests_to_a_backbone_and_those_with_a_rung_stay_in_it(server, asked, protocol):
    stock = Stock(server, protocol)
    for tenant, texts, pairs, _ in asked:
        direct = stock.ask(texts, tenant.id, pairs, OUTPUTS)
        assert (direct["LEVEL"] == 2).all()
        fixed = stock.ask(texts, tenant.id, pairs, OUTPUTS, ALIAS, hplm_rung=1)
        for name in OUTPUTS:
            np.testing.assert_array_equal(fixed[name], direct[name])


def test_all_outputs_of_the_alias_are_those_of_a_backbone(server, asked):
    _, texts, _, _ = asked[0]
    text = Stock(server, "http").tensor("TEXT", np.array([[one.encode()] for one in texts], dtype=object))
    client = Stock(server, "http").client
    named = client.infer(ALIAS, [text], parameters={"tenant": "many"}).get_response()["outputs"]
    assert sorted(output["name"] for output in named) == sorted(OUTPUTS)
    top = Stock(server, "http").ask(texts, "pair", outputs=OUTPUTS, model=ALIAS, top_k=2)
    assert top["LABEL"].shape == (len(texts), 2) and (np.diff(top["SCORE"]) <= 0).all()


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_only_the_link_stands_for_a_key(server, protocol):
    stock = Stock(server, protocol)
    for model in (FAR, f"{FAR}-lookup"):
        for claim in ({}, {"hplm_across": "to"}, {"hplm_across": "to", "hplm_forwarded": "00" * 32}):
            with pytest.raises(InferenceServerException, match="no_tenant"):
                stock.ask(["a b"], "pair", outputs=["TICKET"] if model.endswith("lookup") else ["LABEL"], model=model, **claim)
    with pytest.raises(InferenceServerException, match="no_tenant"):
        stock.ask(["a b"], "pair-there", outputs=["LABEL"], model=ALIAS, hplm_across="to")
    opened = stock.ask(["a b"], "pair", outputs=["LEVEL"], model=FAR, headers={"authorization": f"Bearer {SECRET}"})
    assert opened["LEVEL"].tolist() == [[1]]


def test_unsure_texts_are_given_back_to_the_alias_only(server, asked):
    """A client may ask lookup and upper by themselves, and claim what the alias says."""
    stock = Stock(server, "grpc")
    for tenant, texts, pairs, crossings in asked:
        if not any(one.read for one in crossings):
            continue
        claim = {"hplm_across": "from", "hplm_forwarded": "00" * 32}
        ticket = stock.ask(texts, tenant.id, pairs, ["TICKET"], "toy-lookup", **claim)["TICKET"]
        given = stock.client.infer("toy-upper", [stock.tensor("TICKET", ticket, "UINT8")])
        assert (given.as_numpy("ONWARD") == b"").all() and (given.as_numpy("LEVEL") == 2).all()


def test_joined_texts_are_counted(server, asked):
    tenant, texts, pairs, crossings = next(one for one in asked if not any(crossing.is_close for crossing in one[3]))
    joined = sum(crossing.read is not None for crossing in crossings)

    def counted(scraped):
        return scraped.of("hplm_across_texts_total", source="toy", target=FAR, outcome="joined")

    before = counted(settled(server, {}))
    Stock(server, "grpc").ask(texts, tenant.id, pairs, ["LABEL"], ALIAS)
    eventually(lambda: counted(Scraped(server)) == before + joined)


ELSEWHERE = {  # links that lead to nothing that was profiled
    "mark": Link("nowhere", "mark", 1, PLANS["mark"]),
    **{name: Link(FAR, name, 2, PLANS[name]) for name in ("many", "pair", "word")},
}


@pytest.fixture(scope="module")
def misled(tmp_path_factory):
    made = make_linked(tmp_path_factory.mktemp("misled"), ELSEWHERE)
    with serving(made.repository) as server:
        yield server


def test_a_link_that_leads_elsewhere_leaves_the_answer_in_hand_and_is_counted_and_logged(misled, asked):
    stock, unsure = Stock(misled, "grpc"), {}
    for tenant, texts, pairs, crossings in asked:
        answer = stock.ask(texts, tenant.id, pairs, OUTPUTS, ALIAS)
        link = ELSEWHERE[tenant.id]
        for i, one in enumerate(crossings):
            if not one.is_close:
                assert answer["LEVEL"][i, 0] == one.climb.level
                assert answer["CONFIDENCE"][i, 0] == pytest.approx(one.climb.confidence, abs=1e-3)
                logits = one.climb.answer.logits
                np.testing.assert_allclose(answer["LOGITS"][i, : len(logits)], logits, atol=1e-3)
                unsure[link.backbone] = unsure.get(link.backbone, 0) + one.climb.goes_across
    for backbone, texts in unsure.items():
        assert texts > 0
        eventually(
            lambda backbone=backbone, texts=texts: (
                Scraped(misled).of("hplm_across_texts_total", target=backbone, outcome="changed") >= texts
            )
        )


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    slow = {name: {"rate": 1e-6, "burst": 1.0} for name in FAR_IDS.values()}
    made = make_linked(tmp_path_factory.mktemp("limited"), settings=slow)
    with serving(made.repository) as server:
        yield server


def test_texts_that_go_on_count_against_the_limits_there_and_keep_their_answers_beyond_them(limited, asked):
    stock = Stock(limited, "http")
    requests = [one for one in asked if one[0].id == "many"]
    levels = [stock.ask(texts, "many", pairs, ["LEVEL"], ALIAS)["LEVEL"].max() for _, texts, pairs, _ in requests]
    across = [any(crossing.read for crossing in crossings) for *_, crossings in requests]
    assert sum(across) > 1 and levels.count(3) == 1, "one request was allowed there"
    with pytest.raises(InferenceServerException, match="quota"):
        stock.ask(["a b"], "many", outputs=["LABEL"], model=FAR)
    eventually(lambda: Scraped(limited).of("hplm_across_texts_total", outcome="quota") > 0)


def test_time_that_is_out_there_leaves_the_answer_in_hand(limited, asked):
    """Whatever the time, there is an answer or a missed deadline, and never another failure."""
    stock, outcomes = Stock(limited, "http"), set()
    _, texts, pairs, _ = next(one for one in asked if one[0].id == "mark")
    for timeout in (1, 2000, 5000, 20_000, 60_000_000):
        try:
            answer = stock.ask(texts, "mark", pairs, ["LEVEL"], ALIAS, timeout=timeout)
            outcomes.add("answered")
            assert set(answer["LEVEL"].ravel().tolist()) <= {2, 3}
        except InferenceServerException as error:
            assert "[deadline]" in error.message()
            outcomes.add("late")
    assert outcomes == {"answered", "late"}


def test_an_engine_that_ends_there_leaves_the_answers_in_hand(server, asked):
    """Each request gets one answer, and texts go on again when there is a new engine."""
    question, level = next(
        (text, one.climb.level)
        for tenant, texts, _, ones in asked
        for text, one in zip(texts, ones, strict=True)
        if tenant.id == "many" and one.read and not one.is_close
    )
    stock, requests = Stock(server, "grpc"), 20

    def ask(_=None):
        return int(stock.ask([question], "many", outputs=["LEVEL"], model=ALIAS)["LEVEL"][0, 0])

    assert ask() == 3
    (upper,) = [stub.pid for stub in stubs(server.pid) if stub.model == f"{FAR}-upper"]
    (engine,) = [pid for pid in process_group.members(server.pid) if _parent(pid) == upper]
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(requests) as pool:
        answers = [pool.submit(ask) for _ in range(requests)]
        eventually(lambda: sum(one.held for one in holders(server.id) if one.model == f"{FAR}-upper") == requests)
        os.kill(engine, signal.SIGKILL)
        assert [answer.result(timeout=60) for answer in answers] == [level] * requests
    eventually(lambda: Scraped(server).of("hplm_across_texts_total", outcome="draining") >= requests)
    eventually(lambda: ask() == 3)


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_links_and_what_they_lead_to_change_while_they_are_served(linked, asked, tmp_path):
    given = [(texts, pairs) for tenant, texts, pairs, _ in asked if tenant.id == "mark"]
    texts, pairs = (sum(side, ()) for side in zip(*given, strict=True))  # each version has other draws, so one is too few
    near, far = (Store(shutil.copytree(store.folder, tmp_path / store.config.name)) for store in (linked.near, linked.far))
    repository, state = shutil.copytree(linked.repository, tmp_path / "repository"), tmp_path / "state"
    here, there = (Manager.open(repository, state, store.config.name) for store in (near, far))
    tenant, target = next(one for one in near_tenants() if one.id == "mark"), far.tenant("mark-there")
    link = link_of(near, tenant)
    with serving(repository, state=state) as server:
        stock = Stock(server, "http")

        def level():
            return stock.ask(texts, "mark", pairs, ["LEVEL"], ALIAS)["LEVEL"].max()

        assert level() == 3
        remove_link(near, tenant)
        update_tenant(here, near, "mark")
        eventually(lambda: level() == 2)
        save_link(near, tenant, link, {})
        update_tenant(here, near, "mark")
        eventually(lambda: level() == 3)
        update_tenant(there, far, "mark-there")  # the same version of the store under another number
        eventually(lambda: stock.ask(texts, "mark-there", pairs, ["VERSION"], FAR)["VERSION"][0, 0] == b"2")
        eventually(lambda: level() == 3)
        random_tenant(far, replace(target, version=3), 0.3, seed=1)
        update_tenant(there, far, "mark-there")
        eventually(lambda: level() == 2)
        eventually(lambda: Scraped(server).of("hplm_across_texts_total", outcome="changed") > 0)
