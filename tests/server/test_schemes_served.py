"""The baselines behind a real Triton: the same names and errors as hPLMs, and the answers of their models."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.http
from tritonclient.utils import InferenceServerException

from builder.publish.model_configs import ServingOptions
from research.baselines.models import WholeModels
from research.schemes.export import export_scheme
from testing.toy import TENANTS, Toy, random_text
from tests.server.stock import LIBRARIES, Stock
from tests.support.servers import serving

pytestmark = pytest.mark.slow

OPTIONS = ServingOptions(dtype="fp32", threads=1, batch_tokens=128)


@pytest.fixture(scope="module")
def served(toy: Toy, tmp_path_factory: pytest.TempPathFactory):
    repository = tmp_path_factory.mktemp("inprocess")
    export_scheme(toy.store, repository, OPTIONS, "dedicated_inprocess", resident=2)
    with serving(repository) as server:
        yield server, _opened(repository / "toy")


def _opened(model: Path) -> WholeModels:
    return WholeModels(model / "1", len(TENANTS), 1024, torch.device("cpu"), torch.float32)


def _logits(models: WholeModels, tenant: str, text: str) -> np.ndarray:
    ((_, rows),) = models.answer([models.question({"tenant": tenant}, [text], None)])
    return rows[0].logits


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_many_tenants_at_once_with_memory_for_two_models(served, protocol) -> None:
    server, models = served
    rng, stock = random.Random(protocol), Stock(server, protocol)
    asked = [(rng.choice(TENANTS).id, random_text(rng, 30)) for _ in range(60)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: stock.ask([one[1]], one[0]), asked))
    for (tenant, text), answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer["LOGITS"][0], _logits(models, tenant, text), atol=1e-4)


def test_errors_have_the_words_of_hplms(served) -> None:
    stock = Stock(served[0], "http")
    refused = [(["x"], "nobody", "no_tenant"), ([" "], "acme", "invalid_input"), ([b"\xff"], "acme", "invalid_input")]
    for texts, tenant, word in refused:
        with pytest.raises(InferenceServerException, match=rf"\[{word}\]"):
            stock.ask(texts, tenant)


def test_dedicated_models_are_loaded_one_by_one(toy: Toy, tmp_path: Path) -> None:
    export_scheme(toy.store, tmp_path, OPTIONS, "dedicated")
    with serving(tmp_path, load=()) as server:
        name, secret = server.admin_header
        client = tritonclient.http.InferenceServerClient(server.http_url)
        assert not client.is_model_ready("toy-acme")
        client.load_model("toy-acme", headers={name: secret})
        text = random_text(random.Random(1))
        answer = Stock(server, "http").ask([text], model="toy-acme")
        np.testing.assert_allclose(answer["LOGITS"][0], _logits(_opened(tmp_path / "toy-acme"), "acme", text), atol=1e-4)
        assert not client.is_model_ready("toy-beta")
        client.unload_model("toy-acme", headers={name: secret})
