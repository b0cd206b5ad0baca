"""Every way into a real server gives the answers of the reference, whatever comes in at the same time by the others."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from builder.evaluation.evaluation import evaluate_served, evaluate_tenant
from hplm_client import HplmClient
from testing.toy import WORDS, random_text
from tests.builder.training.small_tenants import write
from tests.server.stock import LIBRARIES, body_of, posted, refused
from tests.support.answers import Comparison
from tests.tasks import TENANTS, expected_confidence, expected_logits, question, same_labels

BACKBONES = {  # of each server, with their precision
    "toy": {"toy": "fp32", "tasks": "fp32"},
    "precisions": {"bf16": "bf16", "int8": "int8"},
    "group": {"toy": "fp32", "deep": "fp32"},  # two engines, of two stages each
}
OUTPUTS = ("LABEL", "SPAN", "LOGITS", "CONFIDENCE", "TOKENS")
EMBEDDED = ("LABEL", "EMBEDDING", "TOKENS")
pytestmark = pytest.mark.slow
on_toy = pytest.mark.server("toy")


class Ways:
    """Sends texts by a way, and returns labels, spans, logits and, if it tells it, confidence of each."""

    def __init__(self, server, clients):
        self.stocks = {protocol: server.stock(protocol) for protocol in LIBRARIES}
        self.clients = {
            (protocol, backbone): clients.enter_context(HplmClient(url, protocol, backbone))
            for protocol, url in (("http", server.http_url), ("grpc", server.grpc_url))
            for backbone in server.built.stores
        }

    def ask(self, way, protocol, backbone, tenant, task, texts, pairs):
        if task == "embed":
            return [("", [], [vector], None) for vector in self.vectors(way, protocol, backbone, tenant, texts)]
        if way == "client":
            answers = self.clients[protocol, backbone].infer_batch(texts, tenant=tenant, pairs=pairs, logits=True)
            return [([row.label for row in one.rows], [row.span for row in one.rows], [row.logits for row in one.rows], None)
                    for one in answers]  # fmt: skip
        answer = self.stocks[protocol].ask(texts, tenant, pairs, OUTPUTS, "hplm" if way == "alias" else backbone)
        assert (answer["TOKENS"] > 2).all()
        return [([label.decode() for label in answer["LABEL"][i]], [tuple(span) for span in answer["SPAN"][i].tolist()],
                 answer["LOGITS"][i], answer["CONFIDENCE"][i, 0]) for i in range(len(texts))]  # fmt: skip

    def vectors(self, way, protocol, backbone, tenant, texts):
        if way == "client":
            answers = self.clients[protocol, backbone].infer_batch(texts, tenant=tenant, embedding=True, tokens=True)
            assert all(one.rows == () and one.tokens > 2 for one in answers)
            return [one.embedding for one in answers]
        answer = self.stocks[protocol].ask(texts, tenant, None, EMBEDDED, "hplm" if way == "alias" else backbone)
        assert (answer["TOKENS"] > 2).all() and answer["LABEL"] is None
        return answer["EMBEDDING"]


@pytest.mark.parametrize("served", [pytest.param(name, marks=pytest.mark.server(name)) for name in BACKBONES])
def test_every_way_answers_as_the_reference_does(server, served):
    rng, asked = random.Random(served), []
    for name in [name for name, dtype in BACKBONES[served].items() if dtype == "fp32"]:
        server.tenant(name)  # beside the exported ones: it is added now
    known = {name: server.manager(name).current().tenants for name in BACKBONES[served]}
    if served == "group":
        known = {name: [one for one in tenants if one.domain != "law"] for name, tenants in known.items()}
    twice = [tenant.id for tenants in known.values() for tenant in tenants]
    for backbone, tenants in known.items():
        for tenant in tenants:
            few = [question(rng, tenant.task) if backbone == "tasks" else (random_text(rng), None) for _ in range(5)]
            texts, pairs = [text for text, _ in few], [pair for _, pair in few]
            ways = ["model"] + ["alias"] * (twice.count(tenant.id) == 1)
            ways += ["client"] * (tenant.task in ("classify", "tag", "regress", "embed"))
            for way in ways:
                for protocol in LIBRARIES:
                    for part in (slice(1), slice(1, 5)):
                        own = None if pairs[0] is None else pairs[part]
                        asked.append((way, protocol, backbone, tenant, texts[part], own))
    rng.shuffle(asked)
    with ExitStack() as clients, ThreadPoolExecutor(8) as pool:
        ways = Ways(server, clients)
        answers = list(pool.map(lambda one: ways.ask(*one[:3], one[3].id, one[3].task, *one[4:]), asked))
    references = {name: server.reference(name, dtype == "int8") for name, dtype in BACKBONES[served].items()}
    comparisons = {name: Comparison() for name in known}
    for (way, protocol, backbone, tenant, texts, pairs), answer in zip(asked, answers, strict=True):
        reference = references[backbone]
        for i, (labels, spans, logits, sure) in enumerate(answer):
            given = texts[i], tenant.id, pairs and pairs[i]
            expected = np.array(expected_logits(reference, tenant, texts[i], pairs and pairs[i]), np.float32)
            found = np.asarray(logits, np.float32)
            comparisons[backbone].add(f"{tenant.id} by {way} over {protocol}", found[: len(expected)], expected)
            assert not found[len(expected) :].any()
            if BACKBONES[served][backbone] == "fp32" and tenant.task != "embed":
                reading = reference.answer(*given)
                rows = len(reading.labels)
                assert same_labels(tenant.task, labels[:rows], reading.labels), (way, protocol, given)
                assert spans[:rows] == reading.spans, (way, protocol, given)
                assert set(labels[rows:]) <= {""} and set(spans[rows:]) <= {(-1, -1)}
                confident = expected_confidence(reference, tenant.id, labels, found, texts[i], pairs and pairs[i])
                assert sure is None or sure == pytest.approx(confident, abs=1e-3), (way, protocol, given)
    for backbone, dtype in BACKBONES[served].items():
        comparisons[backbone].assert_equal(dtype)


@on_toy
@pytest.mark.parametrize("protocol", LIBRARIES)
def test_outputs_have_their_documented_names_types_and_shapes(server, protocol):
    stock, text = server.stock(protocol), f"{WORDS[0]} {WORDS[1]} 日本"
    one = stock.ask([text], "acme")
    assert one["LABEL"].shape == (1, 1) and one["LABEL"][0, 0].decode() in ("red", "grün", "blue")
    assert one["SCORE"].dtype == np.float32 and 1 / 3 <= one["SCORE"][0, 0] <= 1
    assert one["LOGITS"].shape == (1, 1, 3) and one["SPAN"].tolist() == [[[0, len(text)]]]
    assert one["VERSION"].tolist() == [[b"1"]]
    best = stock.ask([text], "city", top_k=4)
    assert best["LABEL"].shape == (1, 4) and (np.diff(best["SCORE"][0]) <= 0).all()
    tags = stock.ask([text, WORDS[2]], "beta")
    assert tags["SPAN"][0].tolist() == [[0, 2], [3, 5], [6, 8]] and tags["LABEL"][1, 1:].tolist() == [b"", b""]
    assert stock.ask([text], "acme", outputs=["SCORE"]).keys() == {"SCORE"}
    for named in ("SCORE", " VERSION, SCORE"):  # only these are made
        assert stock.ask([text], "acme", outputs=["SCORE"], made=named)["SCORE"].tolist() == one["SCORE"].tolist()
    assert stock.ask([text], "acme", outputs=["LABEL"], made="SCORE")["LABEL"] is None
    assert stock.ask([text, text], "acme", outputs=["LEVEL"], hplm_rung=7)["LEVEL"].tolist() == [[1], [1]]


@on_toy
@pytest.mark.parametrize("protocol", LIBRARIES)
def test_a_vector_is_as_its_request_asks(server, protocol):
    stock, reference, text = server.stock(protocol), server.reference("tasks"), f"{WORDS[0]} {WORDS[1]}"
    for tenant, asked in (("near", {"hplm_prefix": "query"}), ("short", {"dimensions": 5}), ("first", {})):
        given = {name.removeprefix("hplm_"): value for name, value in asked.items()}
        found = stock.ask([text], tenant, outputs=("EMBEDDING", "TOKENS", "VERSION", "SCORE"), model="tasks", **asked)
        expected = reference.forward(text, tenant, **given).numpy()
        assert found["EMBEDDING"].dtype == np.float32 and found["EMBEDDING"] == pytest.approx(expected, abs=1e-3)
        assert found["TOKENS"].tolist() == [[4 + 2 * (tenant == "near")]] and found["SCORE"] is None
    for tenant, made, named in (
        ("near", "SCORE,VERSION", ("EMBEDDING", "SCORE")),
        ("mark", "EMBEDDING", ("LABEL", "EMBEDDING")),
    ):
        with refused("invalid_input", *named):
            stock.ask([text], tenant, made=made, model="tasks")


@on_toy
def test_an_answer_in_json_is_json(server):
    """RFC 8259 has no NaN and no infinity. Here two texts have fewer rows than the longest, and a word has no token."""
    texts = [f"{WORDS[0]} {WORDS[1]} {WORDS[2]}", WORDS[3], f"{WORDS[4]} \u200b"]
    _, said = posted(server, ("toy", "infer"), body_of(texts, parameters={"tenant": "beta"}))
    answer = json.loads(said, parse_constant=lambda number: pytest.fail(f"{number} is no JSON"))
    listed = {"LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION", "TOKENS"}
    assert {output["name"] for output in answer["outputs"]} == listed


def labelled(reference, tenant, text, pair):
    """Returns a line of test data whose label is the tenant's own answer."""
    found = reference.answer(text, tenant.id, pair)
    if tenant.task == "embed":
        other = " ".join(reversed(text.split()))
        return {"text": text, "pair": other, "score": len(text)} if len(text) % 3 == 0 else {"text": text, "positive": other}
    line = {"text": text} | ({"text_pair": pair} if pair is not None else {})
    if tenant.task == "multilabel":
        return {**line, "labels": found.labels}
    if tenant.task == "regress":
        return {**line, "label": float(found.labels[0])}
    if tenant.task == "span":
        answered = found.labels != [""]
        starts = [found.spans[0][0]] if answered else []
        return {**line, "answers": {"text": found.labels if answered else [], "answer_start": starts}}
    return {"tokens": text.split(), "tags": found.labels} if tenant.task == "tag" else {**line, "label": found.labels[0]}


@on_toy
def test_served_scores_equal_those_computed_here(server, tmp_path):
    reference, rng = server.reference("tasks"), random.Random(10)  # with 9, one label is decided by 0.0002
    for tenant in TENANTS:
        lines = [labelled(reference, tenant, *question(rng, tenant.task)) for _ in range(20)]
        path = write(tmp_path / f"{tenant.id}.jsonl", lines)
        evaluation = evaluate_tenant(server.built.stores["tasks"], tenant.id, path, torch.device("cpu"))
        with HplmClient(server.grpc_url, "grpc", "tasks") as client:
            served = evaluate_served(client, evaluation).scores
        assert served.metric == evaluation.scores.metric and served.values == pytest.approx(evaluation.scores.values, abs=1e-3)
        assert served.main == pytest.approx(1, abs=1e-3) or tenant.task == "embed", tenant.id
