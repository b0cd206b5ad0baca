"""The schemes beside hPLMs: baselines give the answers of the models that they represent, each tunes only its own part."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from builder.evaluation.evaluation import evaluate_tenant
from builder.learning.bodies import WholeBody
from builder.publish.export import refuse_mixture
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.data import Data
from builder.training.finetuning import TrainingOptions
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from research.baselines.models import WholeModels
from research.schemes.__main__ import main
from research.schemes.export import NOTES, evenly, export_scheme
from research.schemes.trained import SCHEMES, body_of, score_schemes, train_scheme
from testing.random_store import random_table, random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.builder.checkpoints import save_bert
from tests.builder.training.small_tenants import classified, pretend, write
from tests.support.device import DEVICE
from tests.support.fake_triton import Request, model_of
from tests.support.learning import by_one_step
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

OPTIONS = ServingOptions(dtype="fp32", batch_tokens=128)
RNG = random.Random(5)
TEXTS = [random_text(RNG, 40) for _ in range(24)]
TENANTS = [
    TenantVersion("acme", 1, "root", 1, "classify", ["red", "green", "blue"], 4),
    TenantVersion("beta", 1, "root", 1, "tag", ["O", "PART"], 0),
    TenantVersion("city", 1, "root", 1, "classify", ["no", "yes"], 0, head_function="tanh"),
    TenantVersion("dune", 1, "root", 1, "multilabel", ["a", "b", "c"], 0),
]
CLASSIFY = training_task("classify")
OWN = TrainingOptions(epochs=1, rank=4)
SIDES = ["left", "right"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory):
    """A BERT of four layers, and a store with its halves, a root of random numbers and tenants."""
    folder = tmp_path_factory.mktemp("bert")
    saved = str(save_bert(folder / "bert", vocabulary=200, positions=64))
    read = load_checkpoint(saved, "tiny", 2, 2)
    store = Store.create(folder / "store", saved, read.config, read.tokenizer_json, *split(read))
    random_table(store, "root", 1, None, 2000, 1)
    for seed, tenant in enumerate(TENANTS):
        random_tenant(store, tenant, 0.3, seed)
    return transformers.BertModel.from_pretrained(saved, add_pooling_layer=False).eval(), store


@pytest.fixture(scope="module")
def repositories(bert, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    _, store = bert
    folder = tmp_path_factory.mktemp("repositories")
    for scheme in NOTES:
        export_scheme(store, folder / scheme, OPTIONS, scheme, resident=2)
    return {scheme: folder / scheme for scheme in NOTES}


def open_models(repository: Path, room: int = 2, dtype: torch.dtype = torch.float32) -> WholeModels:
    return WholeModels(repository / "tiny/1", room, OPTIONS.batch_tokens, DEVICE, dtype)


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
    rounded = open_models(repositories["dedicated_inprocess"], room=1, dtype=torch.bfloat16)
    for tenant in ("acme", "dune"):
        ((_, (answer,)),) = rounded.answer([rounded.question({"tenant": tenant}, TEXTS[:1], None)])
        np.testing.assert_allclose(answer.logits, by_transformers(bert, tenant, TEXTS[0]), atol=0.1)
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


def read_of(store, path, maker, count, labels):
    """Returns data of so many examples, which it writes to the path."""
    rng, reader = random.Random(0), Reader(store, "root", 1)
    labelled = CLASSIFY.read(write(path, [maker(rng) for _ in range(count)]))
    texts = reader.read(labelled, CLASSIFY, labels)
    return Data(reader, CLASSIFY, labels, texts, texts, DEVICE)


@pytest.fixture(scope="module")
def data(bert, tmp_path_factory):
    return read_of(bert[1], tmp_path_factory.mktemp("data") / "data.jsonl", classified, 40, SIDES)


def test_whole_bodies_equal_the_original_and_students_start_from_its_layers(bert, tmp_path):
    stock, store = bert
    data = read_of(store, tmp_path / "pairs.jsonl", lambda rng: {**classified(rng), "text_pair": random_text(rng, 9)}, 4, SIDES)
    pack = data.reader.pack(data.train, np.argsort(data.train.lengths), DEVICE)
    pack, teacher = replace(pack, reading=torch.arange(len(pack.tokens))), WholeBody.of(store).eval()
    with torch.no_grad():
        texts = zip(pack.tokens.split(pack.lengths), pack.segments.split(pack.lengths), strict=True)
        theirs = [stock(own[None], token_type_ids=kinds[None], output_hidden_states=True).hidden_states for own, kinds in texts]
        states = teacher.with_layers(range(4)).states(pack, None)
        for layers, expected in enumerate(map(torch.hstack, zip(*theirs, strict=True))):
            student = teacher.with_layers(range(layers))
            for ours in (student(pack, None), states[layers]):
                assert torch.allclose(ours, expected[0], atol=1e-4)
        assert torch.allclose(teacher(pack, None), expected[0], atol=1e-4)
    assert (evenly(6, 3), evenly(6, 2), evenly(12, 4)) == ([0, 2, 4], [1, 4], [1, 4, 7, 10])
    student.layers[0].qkv.weight.data.zero_()
    assert teacher.layers[0].qkv.weight.any()  # a student changes copies


WHOLE = {"embeddings", 0, 1, 2, 3}
TUNED = {  # the layers that change, and how many have an adapter
    "dedicated": (WHOLE, 0), "dedicated-lower": ({"embeddings", 0, 1}, 0), "dedicated-upper": ({2, 3}, 0),
    "shared": (set(), 0), "adapter": (set(), 2), "plot": ({0, 1}, 0), "hplm": (set(), 2),
    "distil": ({"embeddings", 0, 1}, 0), "tiny-third": ({"embeddings", 0}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TUNED)
def test_each_scheme_tunes_only_its_own_part(bert, data, name):
    """Of a student, it is all of its fewer layers. The adapter of what upper layers learn is cut from their change.

    They take one step. That a tenant learns in this way, and `plot` too: tests/builder/training, tests/cli/test_whole_way.py.
    """
    store = bert[1]
    own = replace(OWN, adapter="lora", body_rate=1e-3) if name in ("adapter", "hplm") else OWN
    with by_one_step():
        trained = train_scheme(store, data, name, own)
    if name in SCHEMES and SCHEMES[name].kept < 1:
        before = WholeBody.of(store).with_layers(evenly(4, len(trained.body.layers))).state_dict()
    else:
        before = body_of(store, name).state_dict()
    changed = {key for key, tensor in trained.body.state_dict().items() if not torch.equal(tensor, before[key])}
    found = {int(key.split("layers.")[1].split(".")[0]) if "layers." in key else "embeddings" for key in changed}
    assert (found, len(trained.model.adapters)) == TUNED[name], name
    if trained.model.adapters:
        assert all(float(slot["ffn_in/b"].detach().abs().max()) > 0 for slot in trained.model.adapters)
        assert 0.3 < trained.report["change_held"] < 1


def test_schemes_learn_from_the_tenants_own_data_and_no_other(bert, tmp_path):
    store, rng = Store(shutil.copytree(bert[1].folder, tmp_path / "store")), random.Random(3)
    train, other, test = (
        write(tmp_path / f"{part}.jsonl", [classified(rng) for _ in range(40)]) for part in ("train", "other", "test")
    )
    pretend(store, "classify", train, tenant="own", rank=0, epochs=1)
    evaluation = evaluate_tenant(store, "own", test, DEVICE)

    def compared(*files):
        with by_one_step():
            return [*score_schemes(store, evaluation, [("shared", 0), ("shared", 1)], DEVICE, *files)]

    moved = train.rename(tmp_path / "moved.jsonl")
    (first, other_seed), again = compared(moved), compared(moved)
    assert len(first) == len(other_seed) == 40 and again == [first, other_seed]
    for files, named in (((), (train, "--train")), ((other,), (other, "--train")), ((moved, other), (other, "--dev"))):
        with pytest.raises(InvalidInput, match=mentioning(*named, "'own'")):
            compared(*files)
