"""The scores of `hplm evaluate` are the same from a real server and from this process, for every task."""

from __future__ import annotations

import random

import pytest
import torch

from builder.evaluation.tenant import evaluate_tenant, score_served
from hplm_client import HplmClient
from tests.builder.training.small_tenants import write
from tests.tasks import TENANTS, question


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


@pytest.mark.slow
@pytest.mark.server("toy")
def test_served_scores_equal_those_computed_here(server, tmp_path):
    reference, rng = server.reference("tasks"), random.Random(10)  # with 9, one label is decided by 0.0002
    for tenant in TENANTS:
        lines = [labelled(reference, tenant, *question(rng, tenant.task)) for _ in range(20)]
        path = write(tmp_path / f"{tenant.id}.jsonl", lines)
        evaluation = evaluate_tenant(server.built.stores["tasks"], tenant.id, path, torch.device("cpu"), show_progress=False)
        with HplmClient(server.grpc_url, "grpc", "tasks") as client:
            served = score_served(client, evaluation, show_progress=False)
        assert served.metric == evaluation.scores.metric and served.values == pytest.approx(evaluation.scores.values, abs=1e-3)
        assert served.main == pytest.approx(1, abs=1e-3), tenant.id
