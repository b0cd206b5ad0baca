"""The baselines give the answers of the models that they represent."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.publish.export import refuse_mixture
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.errors import Broken, DeadlineMissed, Draining, InvalidInput, QueueFull
from research.baselines.models import WholeModels, Worker
from research.schemes.__main__ import main
from research.schemes.export import NOTES, export_scheme
from testing.random_store import random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.research.schemes.checkpoints import bert_and_store
from tests.support.device import DEVICE
from tests.support.fake_triton import Request, model_of
from tests.support.message import mentioning, mentions
from tests.support.wait import Hold

pytestmark = pytest.mark.slow

OPTIONS = ServingOptions(dtype="fp32", batch_tokens=128)
RNG = random.Random(5)
TEXTS = [random_text(RNG, 40) for _ in range(24)]
TENANTS = [
    TenantFile("acme", 1, "root", 1, "classify", ["red", "green", "blue"], 4),
    TenantFile("beta", 1, "root", 1, "tag", ["O", "PART"], 0),
    TenantFile("city", 1, "root", 1, "classify", ["no", "yes"], 0, head_function="tanh"),
    TenantFile("dune", 1, "root", 1, "multilabel", ["a", "b", "c"], 0),
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory):
    model, store = bert_and_store(tmp_path_factory.mktemp("bert"))
    for seed, tenant in enumerate(TENANTS):
        random_tenant(store, tenant, 0.3, seed)
    return model, store


@pytest.fixture(scope="module")
def repositories(bert, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    _, store = bert
    folder = tmp_path_factory.mktemp("repositories")
    for scheme in NOTES:
        export_scheme(store, folder / scheme, OPTIONS, scheme, resident=2)
    return {scheme: folder / scheme for scheme in NOTES}


def open_models(repository: Path, room: int = 2) -> WholeModels:
    return WholeModels(repository / "tiny/1", room, OPTIONS.batch_tokens, DEVICE, torch.float32)


def by_transformers(bert, tenant_id: str, text: str) -> np.ndarray:
    model, store = bert
    tenant = store.tenant(tenant_id)
    tokens = torch.from_numpy(store.tokenizer().encode(text).tokens.astype(np.int64))
    with torch.no_grad():
        hidden = model(tokens[None]).last_hidden_state[0]
    head = {name: tensor.float() for name, tensor in store.tenant_weights(tenant)[1].items()}
    if tenant.head_function:
        hidden = torch.tanh(hidden @ head["dense"].T + head["dense_bias"])
    logits = (hidden @ head["weight"].T + head["bias"]).numpy()
    return logits[1 : len(text.split()) + 1] if tenant.task == "tag" else logits[:1]


def asking(model, tenant: str, text: str) -> Request:
    request = Request({"TEXT": [text]}, {"tenant": tenant})
    request.requested_output_names = lambda: ["LABEL", "LOGITS"]
    model.execute([request])
    return request


def test_dedicated_models_equal_transformers_although_two_of_four_fit(bert, repositories) -> None:
    """Triton is played here. `tests/research/comparison` serves baselines by a real one."""
    rng = random.Random(1)
    asked = [(rng.choice(TENANTS).id, rng.choice(TEXTS)) for _ in range(40)]
    with model_of(repositories["dedicated_inprocess"], "tiny", "hplm_whole", "research.backends") as model:
        for (tenant, text), request in [(one, asking(model, *one)) for one in asked]:
            np.testing.assert_allclose(request.next()["LOGITS"][0], by_transformers(bert, tenant, text), atol=1e-4)
        refused = ("nobody", "x", "no_tenant"), ("acme", " ", "invalid_input"), ("acme", "\ud800", "invalid_input")
        for tenant, text, word in refused:
            assert mentions(asking(model, tenant, text).next(), f"[{word}]")
    models = open_models(repositories["compressed"], room=9)
    ((_, (answer,)),) = models.answer([models.question({"tenant": "beta"}, TEXTS[:1], None)])
    assert models.config.upper_layers == 2 and np.isfinite(answer.logits).all()


def test_the_shared_bert_equals_the_dedicated_one_and_adapters_change_its_upper_half(bert, repositories) -> None:
    """Words have 16 bits."""
    shared, adapted = (Reference.open(repositories[scheme] / "tiny" / "1") for scheme in ("shared", "adapter"))
    for tenant in TENANTS:
        expected = by_transformers(bert, tenant.id, TEXTS[0])
        np.testing.assert_allclose(shared.forward(TEXTS[0], tenant.id).numpy(), expected, atol=0.02)
        off = np.abs(adapted.forward(TEXTS[0], tenant.id).numpy() - expected).max()
        assert (off > 0.1) == bool(tenant.rank), tenant.id
    (record,) = [tenant.adapter for tenant in adapted.backbone.view.snapshot.tenants if tenant.adapter is not None]
    changed = [any(tensor.any() for tensor in layer.values()) for layer in adapted.backbone.records.weights(record)]
    assert changed == [False, False, True, True]


def test_schemes_and_options_that_cannot_serve_are_refused(bert, repositories, tmp_path, monkeypatch, capsys) -> None:
    """So is a second scheme in one repository. The same scheme may be exported again."""
    monkeypatch.chdir(tmp_path)
    _, store = bert
    served = {name: f" --repository {folder}" for name, folder in repositories.items()}
    for given, named in {
        "dedicated": ["'dedicated'", "adapter", "compressed"],
        "compressed --resident 0": ["--resident", 0],
        "dedicated_inprocess --dtype int8": ["'dedicated_inprocess'", "int8"],  # whole models have 16 bits at least
        "compressed --slots 7": ["'compressed'", "slots"], "compressed --device gpu": ["device", "'gpu'"],
        f"adapter{served['shared']}": ["'shared'", "'adapter'", "--repository"],
        f"shared{served['compressed']}": ["'compressed'", "'shared'", "--repository"],
    }.items():  # fmt: skip
        assert main([*given.split(), "--store", str(store.folder)]) == 1, given
        assert mentions(capsys.readouterr().err, *named) and not list(tmp_path.iterdir()), given
    again = [*f"compressed --dtype fp32{served['compressed']}".split(), "--store", str(store.folder)]
    assert (main(again), main([*again, "--replace"])) == (1, 0) and mentions(capsys.readouterr().err, "--replace")
    with pytest.raises(InvalidInput, match=mentioning("'compressed'", "'hplm'", "--repository")):  # so does `hplm export`
        refuse_mixture(repositories["compressed"], "tiny")


def test_a_worker_answers_all_accepted_requests_and_refuses_more_than_its_limit(repositories) -> None:
    """Also where a model's file is broken, or a request has waited for too long."""
    folder = repositories["dedicated_inprocess"]
    (folder / "tiny/1/bodies/beta").unlink()
    models, answered, hold = open_models(folder), list[object](), Hold()
    worker = Worker(models, most=3)

    def question(tenant: str, allowed_s: float = 0.0):
        return models.question({"tenant": tenant}, TEXTS[:1], None, allowed_s)

    with hold:
        worker.submit(question("acme"), lambda answer: (hold.pass_through(), answered.append(answer)))
        hold.until_reached()  # the first one is being answered, so the others wait
        for tenant, allowed_s in (("acme", 1e-9), ("beta", 0), ("city", 0)):
            worker.submit(question(tenant, allowed_s), answered.append)
        with pytest.raises(QueueFull):
            worker.submit(question("acme"), answered.append)
    worker.close()
    assert [type(answer) for answer in answered] == [list, DeadlineMissed, Broken, list]
    with pytest.raises(Draining):
        worker.submit(question("acme"), answered.append)
