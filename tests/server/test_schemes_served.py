"""A baseline as a model of Triton, which is played here: the names and errors of hPLMs, and its own answers.

`tests/research/comparison` serves baselines by a real one.
"""

import random

import numpy as np
import torch

from builder.publish.model_configs import ServingOptions
from research.baselines.models import WholeModels
from research.schemes.export import export_scheme
from testing.toy import TENANTS, random_text
from tests.support.fake_triton import Request, model_of
from tests.support.message import mentions


def test_a_baseline_answers_for_its_tenants(toy, tmp_path):
    """It has memory for two of its models, which are asked at once."""
    options = ServingOptions(dtype="fp32", threads=1, batch_tokens=128)
    export_scheme(toy.store, tmp_path, options, "dedicated_inprocess", resident=2)
    models = WholeModels(tmp_path / "toy/1", len(TENANTS), 1024, torch.device("cpu"), torch.float32)
    with model_of(tmp_path, "toy", "hplm_whole", "research.backends") as model:

        def ask(text, tenant):
            request = Request({"TEXT": [text]}, {"tenant": tenant})
            request.requested_output_names = lambda: ["LABEL", "LOGITS"]
            model.execute([request])
            return request

        texts = [(random_text(random.Random(number), 30), tenant.id) for number, tenant in enumerate(TENANTS * 2)]
        for (text, tenant), request in [((text, tenant), ask(text, tenant)) for text, tenant in texts]:
            ((_, rows),) = models.answer([models.question({"tenant": tenant}, [text], None)])
            np.testing.assert_allclose(request.next()["LOGITS"][0], rows[0].logits, atol=1e-4)
        for text, tenant, word in (("x", "nobody", "no_tenant"), ("\ud800", "acme", "invalid_input")):
            assert mentions(ask(text, tenant).next(), f"[{word}]")
