"""A real Triton answers every task like the reference: several labels, a number, a piece of a passage."""

import json
import random

import numpy as np
import pytest
import torch

from builder.evaluation.served import score_served
from builder.evaluation.tenant import evaluate_tenant
from hplm_client import HplmClient
from testing.reference import Reference
from tests.server.stock import Stock
from tests.support.message import mentioning
from tests.support.servers import serving
from tests.tasks import TENANTS, expected_logits, make_tasks, question, same_labels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def server(tasks):
    with serving(tasks.repository) as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_every_task_equals_the_reference(server, tasks, protocol):
    stock, reference, rng = Stock(server, protocol), Reference.open(tasks.folder), random.Random(protocol)
    for tenant in TENANTS:
        for count in (1, 1, 4):
            texts, pairs = zip(*(question(rng, tenant.task) for _ in range(count)), strict=True)
            answer = stock.ask(texts, tenant.id, pairs if pairs[0] is not None else None)
            for i, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
                expected = reference.answer(text, tenant.id, pair)
                rows = len(expected.labels)
                labels = [label.decode() for label in answer["LABEL"][i, :rows]]
                assert same_labels(tenant.task, labels, expected.labels)
                assert answer["SPAN"][i, :rows].tolist() == [list(span) for span in expected.spans]
                assert (answer["LABEL"][i, rows:] == b"").all() and (answer["SPAN"][i, rows:] == -1).all()
                logits = expected_logits(reference, tenant, text, pair)
                np.testing.assert_allclose(answer["LOGITS"][i, : len(logits)], logits, atol=1e-3)
                assert (answer["LOGITS"][i, len(logits) :] == 0).all()


def test_the_client_reads_every_task(server, tasks):
    rng, reference = random.Random(3), Reference.open(tasks.folder)
    with HplmClient(server.http_url) as client:
        text, pair = question(rng, "span")
        answer = client.infer(text, tenant="find", pair=pair)
        assert answer.label == pair[slice(*answer.rows[0].span)] == reference.answer(text, "find", pair).labels[0]
        value = client.infer(text, tenant="mark", logits=True).rows[0]
        assert value.logits == pytest.approx([float(value.label)], rel=1e-4)
        assert len(client.infer_batch([text, pair], tenant="many")) == 2


def test_a_missing_passage_is_refused(server):
    with pytest.raises(Exception, match=mentioning("[invalid_input]", "TEXT_PAIR")):
        Stock(server, "grpc").ask(["w"], "find")


def labelled(reference, tenant, text, pair):
    """Returns a line of test data whose label is the tenant's own answer."""
    found = reference.answer(text, tenant.id, pair)
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


def test_served_scores_equal_those_computed_here(server, tasks, tmp_path):
    pytest.importorskip("seqeval", reason="comes with the extra 'build'")
    reference, rng = Reference.open(tasks.folder), random.Random(10)  # with 9, one label is decided by 0.0002
    for tenant in TENANTS:
        path = tmp_path / f"{tenant.id}.jsonl"
        lines = [labelled(reference, tenant, *question(rng, tenant.task)) for _ in range(20)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        evaluation = evaluate_tenant(tasks.store, tenant.id, path, torch.device("cpu"), show_progress=False)
        with HplmClient(server.grpc_url, "grpc", "toy") as client:
            served = score_served(client, evaluation, show_progress=False)
        assert served.metric == evaluation.scores.metric and served.values == pytest.approx(evaluation.scores.values, abs=1e-3)
        assert served.main == pytest.approx(1, abs=1e-3)
