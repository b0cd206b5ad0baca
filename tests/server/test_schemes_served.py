"""The baselines behind a real Triton: the same names and errors as hPLMs, and the answers of their models."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.http

from builder.publish.model_configs import ServingOptions
from research.baselines.models import WholeModels
from research.schemes.export import export_scheme
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, random_text
from tests.server.stock import LIBRARIES, refused

OPTIONS = ServingOptions(dtype="fp32", threads=1, batch_tokens=128)


def opened(model: Path) -> WholeModels:
    return WholeModels(model / "1", len(TENANTS), 1024, torch.device("cpu"), torch.float32)


def logits(models: WholeModels, tenant: str, text: str) -> np.ndarray:
    ((_, rows),) = models.answer([models.question({"tenant": tenant}, [text], None)])
    return rows[0].logits


@pytest.mark.slow
@pytest.mark.server("precisions")
def test_baselines_are_loaded_one_by_one_and_answer_for_their_tenants(server, tmp_path: Path) -> None:
    """Memory is for two models of many tenants, which are asked at once."""
    for name, scheme in (("many", "dedicated_inprocess"), ("each", "dedicated")):
        store = random_store(tmp_path / name, replace(CONFIG, name=name), TENANTS, DOMAINS, spread=0.3)
        export_scheme(store, server.repository, OPTIONS, scheme, resident=2)
    client, admin = tritonclient.http.InferenceServerClient(server.http_url), dict([server.server.admin_header])
    loaded = ("many", "each-acme")
    for model in loaded:
        assert not client.is_model_ready(model)
        client.load_model(model, headers=admin)
    try:
        rng, stocks = random.Random(1), [server.stock(protocol) for protocol in LIBRARIES]
        asked = [(rng.choice(TENANTS).id, random_text(rng, 30), stocks[number % 2]) for number in range(60)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda one: one[2].ask([one[1]], one[0], model="many"), asked))
        models = opened(server.repository / "many")
        for (tenant, text, _), answer in zip(asked, answers, strict=True):
            np.testing.assert_allclose(answer["LOGITS"][0], logits(models, tenant, text), atol=1e-4)
        text = random_text(rng, 30)
        answer = stocks[0].ask([text], model="each-acme")
        expected = logits(opened(server.repository / "each-acme"), "acme", text)
        np.testing.assert_allclose(answer["LOGITS"][0], expected, atol=1e-4)
        assert not client.is_model_ready("each-beta")
        for texts, tenant, word in (
            (["x"], "nobody", "no_tenant"),
            ([" "], "acme", "invalid_input"),
            ([b"\xff"], "acme", "invalid_input"),
        ):
            with refused(word):
                stocks[0].ask(texts, tenant, model="many")
    finally:
        for model in loaded:
            client.unload_model(model, headers=admin)
