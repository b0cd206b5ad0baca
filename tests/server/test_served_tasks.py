"""A real Triton answers every task: the client and `hplm evaluate` read it, and each answer says how sure it is."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from builder.evaluation.served import score_served
from builder.evaluation.tenant import evaluate_tenant
from builder.publish.live import update_tenant
from hplm.levels.calibration import Calibration
from hplm_client import HplmClient
from testing.random_store import change_version
from tests.confidence import CALIBRATIONS, of_logits, of_passage
from tests.server.stock import LIBRARIES
from tests.tasks import TENANTS, question

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

OUTPUTS = ("LABEL", "LOGITS", "CONFIDENCE")


@pytest.mark.parametrize("model", ["tasks", "hplm"])
@pytest.mark.parametrize("protocol", LIBRARIES)
def test_every_task_has_the_confidence_of_its_logits(server, protocol, model):
    stock, reference, rng = server.stock(protocol), server.reference("tasks"), random.Random(protocol)
    for tenant in TENANTS:
        texts, pairs = zip(*(question(rng, tenant.task) for _ in range(4)), strict=True)
        answer = stock.ask(texts, tenant.id, pairs if pairs[0] is not None else None, OUTPUTS, model)
        assert answer["CONFIDENCE"].shape == (4, 1) and answer["CONFIDENCE"].dtype == np.float32
        for i, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
            labels = [label.decode() for label in answer["LABEL"][i]]
            expected = of_logits(tenant.id, labels, answer["LOGITS"][i])  # -1 without a calibration
            near = 1e-6 if expected is not None else 1e-3
            expected = of_passage(reference.windows(text, tenant.id, pair)) if expected is None else expected
            assert answer["CONFIDENCE"][i, 0] == pytest.approx(expected, abs=near)


def test_a_new_calibration_is_served_at_once(server):
    stock, live, store = server.stock(), server.manager("tasks"), server.built.stores["tasks"]
    before = stock.ask(["a b"], "many", outputs=OUTPUTS, model="tasks")
    change_version(store, store.tenant("many"), calibration=Calibration(temperature=9.0))
    change = update_tenant(live, store, "many")
    change_version(store, store.tenant("many"), calibration=CALIBRATIONS["many"])
    assert live.settle(change.generation) == []
    after = stock.ask(["a b"], "many", outputs=(*OUTPUTS, "VERSION"), model="tasks")
    assert after["VERSION"][0, 0] == b"%d" % change.after and (after["LOGITS"] == before["LOGITS"]).all()
    least = np.abs(after["LOGITS"][0, 0]).min()
    assert after["CONFIDENCE"][0, 0] == pytest.approx(1 / (1 + np.exp(-least / 9)), abs=1e-6)
    assert after["CONFIDENCE"][0, 0] != pytest.approx(before["CONFIDENCE"][0, 0], abs=1e-6)
    assert live.settle(live.roll_back("many").generation) == []


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


def test_served_scores_equal_those_computed_here(server, tmp_path):
    pytest.importorskip("seqeval", reason="comes with the extra 'build'")
    reference, rng = server.reference("tasks"), random.Random(10)  # with 9, one label is decided by 0.0002
    for tenant in TENANTS:
        path = tmp_path / f"{tenant.id}.jsonl"
        lines = [labelled(reference, tenant, *question(rng, tenant.task)) for _ in range(20)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        evaluation = evaluate_tenant(server.built.stores["tasks"], tenant.id, path, torch.device("cpu"), show_progress=False)
        with HplmClient(server.grpc_url, "grpc", "tasks") as client:
            served = score_served(client, evaluation, show_progress=False)
        assert served.metric == evaluation.scores.metric and served.values == pytest.approx(evaluation.scores.values, abs=1e-3)
        assert served.main == pytest.approx(1, abs=1e-3)
