"""A baseline as Triton's model: it has the name and errors of hPLMs, and its own answers. Triton is played here.

`tests/research/comparison` serves baselines by a real one.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from builder.publish.model_configs import ServingOptions
from research.baselines.models import WholeModels
from research.schemes.export import export_scheme
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, random_text
from tests.support.fake_triton import Request, model_of
from tests.support.message import mentions

OPTIONS = ServingOptions(dtype="fp32", threads=1, batch_tokens=128)


def test_a_baseline_answers_for_its_tenants(tmp_path):
    """Memory is for two models of many tenants, which are asked at once."""
    store = random_store(tmp_path / "store", CONFIG, TENANTS, DOMAINS, spread=0.3)
    export_scheme(store, tmp_path / "repository", OPTIONS, "dedicated_inprocess", resident=2)
    models = WholeModels(tmp_path / "repository/toy/1", len(TENANTS), 1024, torch.device("cpu"), torch.float32)
    rng = random.Random(1)
    asked = [(rng.choice(TENANTS).id, random_text(rng, 30)) for _ in range(20)]
    with model_of(tmp_path / "repository", "toy", "hplm_whole", "research.backends") as model:

        def ask(text, tenant):
            request = Request({"TEXT": [text]}, {"tenant": tenant})
            request.requested_output_names = lambda: ["LABEL", "LOGITS"]
            model.execute([request])
            return request

        for (tenant, text), request in [((tenant, text), ask(text, tenant)) for tenant, text in asked]:
            ((_, rows),) = models.answer([models.question({"tenant": tenant}, [text], None)])
            np.testing.assert_allclose(request.next()["LOGITS"][0], rows[0].logits, atol=1e-4)
        for text, tenant, word in (
            ("x", "nobody", "no_tenant"),
            (" ", "acme", "invalid_input"),
            ("\ud800", "acme", "invalid_input"),
        ):
            assert mentions(ask(text, tenant).next(), f"[{word}]")
