"""The baselines as Triton's models: they have the names and errors of hPLMs, and their own answers. Triton is played here.

`tests/research/comparison` serves them by a real one.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.publish.model_configs import ServingOptions
from research.baselines.models import WholeModels
from research.schemes.export import export_scheme
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, random_text
from tests.support.fake_triton import Request, model_of
from tests.support.message import mentions

OPTIONS = ServingOptions(dtype="fp32", threads=1, batch_tokens=128)


@pytest.mark.parametrize(("scheme", "name"), [("dedicated_inprocess", "many"), ("dedicated", "many-acme")])
def test_baselines_answer_for_their_tenants(tmp_path, scheme, name):
    """Memory is for two models of many tenants, which are asked at once."""
    store = random_store(tmp_path / "store", replace(CONFIG, name="many"), TENANTS, DOMAINS, spread=0.3)
    export_scheme(store, tmp_path / "repository", OPTIONS, scheme, resident=2)
    models = WholeModels(tmp_path / "repository" / name / "1", len(TENANTS), 1024, torch.device("cpu"), torch.float32)
    rng, known = random.Random(1), [tenant.id for tenant in TENANTS if scheme != "dedicated" or tenant.id == "acme"]
    asked = [(rng.choice(known), random_text(rng, 30)) for _ in range(20)]
    with model_of(tmp_path / "repository", name, "hplm_whole", "research.backends") as model:

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
