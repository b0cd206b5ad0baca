"""The schemes beside hPLMs: the whole BERT equals the original, each tunes only its own part, and students have teachers."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from builder.evaluation.tenant import evaluate_tenant
from builder.store.store import Store
from builder.tasks.lookup import Reader
from builder.tasks.tasks import training_task
from builder.training.data import Data
from builder.training.finetuning import TrainingOptions, finetune
from builder.training.tenant import build_tenant
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from research.schemes.distilled import states_of
from research.schemes.pretrained import evenly
from research.schemes.trained import SCHEMES, body_of, options_of, score_schemes, train_scheme, whole_body
from tests.builder.stores import build, some_lines
from tests.builder.training.small_tenants import classified, paired, write
from tests.research.schemes.checkpoints import save_bert
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CLASSIFY = training_task("classify")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schemes")
    save_bert(folder / "bert")
    checkpoint = load_checkpoint(str(folder / "bert"), "tiny")
    config, tokenizer = checkpoint.config, checkpoint.tokenizer_json
    store = Store.create(folder / "store", str(folder / "bert"), config, tokenizer, *split(checkpoint))
    build(store, folder, "root", some_lines(200, seed=1))
    return store


@pytest.fixture
def data(store, tmp_path):
    rng, labels = random.Random(0), ["left", "right"]
    path = write(tmp_path / "data.jsonl", [classified(rng) for _ in range(40)])
    reader = Reader(store, "root", 1)
    texts = reader.read(CLASSIFY.read(path), CLASSIFY, labels, show_progress=False)
    return Data(reader, CLASSIFY, labels, texts, texts, CPU)


def test_the_whole_body_equals_the_original_model(store, tmp_path):
    rng = random.Random(1)
    path = write(tmp_path / "pairs.jsonl", [paired(rng) for _ in range(4)])
    reader = Reader(store, "root", 1)
    texts = reader.read(CLASSIFY.read(path), CLASSIFY, ["no", "yes"], show_progress=False)
    body = body_of(store, SCHEMES["dedicated"]).eval()
    stock = AutoModel.from_pretrained(store.model, add_pooling_layer=False).eval()
    pack = reader.pack(texts, np.argsort(texts.lengths), CPU, with_sums=False)
    with torch.no_grad():
        ours, start = body(replace(pack, reading=torch.arange(len(pack.tokens))), None), 0
        assert torch.allclose(body(pack, None), ours[pack.reading], atol=1e-5)
        for length in pack.lengths:
            part = slice(start, start + length)
            theirs = stock(pack.tokens[None, part], token_type_ids=pack.segments[None, part]).last_hidden_state[0]
            assert torch.allclose(ours[part], theirs, atol=1e-4)
            start += length


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.kept == 1])
def test_each_scheme_tunes_only_its_own_part(store, data, name):
    own = TrainingOptions(epochs=1, rank=4)
    body = body_of(store, SCHEMES[name])
    before = {key: tensor.clone() for key, tensor in body.state_dict().items()}
    trained = finetune(body, data, options_of(name, own), show_progress=False)
    changed = {key for key, tensor in trained.body.state_dict().items() if not torch.equal(tensor, before[key])}
    assert bool(changed) == (name.startswith("dedicated") or name == "plot")
    if name in ("dedicated-lower", "dedicated-upper"):
        half = range(2) if name == "dedicated-lower" else range(2, 4)
        layers = {key: int(key.split(".")[1]) in half for key in before if key.startswith("layers.")}
        assert all(inside == (key in changed) for key, inside in layers.items())
        assert ("words.weight" in changed) == (name == "dedicated-lower")
    if name == "plot":
        assert all(
            key.startswith("upper.layers.") for key in changed
        )  # the way of an hPLM, whose adapter is cut from this change
    if name == "dedicated":
        assert {"layers.0.qkv.weight", "layers.3.ffn_out.weight", "words.weight"} <= changed
    assert len(trained.model.adapters) == (store.config.upper_layers if name == "adapter" else 0)
    if name == "adapter":
        assert any(float(slot["attention_out/up"].detach().abs().max()) > 0 for slot in trained.model.adapters)
    assert json.dumps(trained.report)


@pytest.mark.parametrize("name", ["hplm", "adapter"])
def test_what_upper_layers_learn_is_cut_from_both_bodies(store, data, name):
    """The lower layers of the whole body do not learn, and both bodies are unchanged at the end."""
    own = TrainingOptions(epochs=1, rank=4, adapter="lora", body_rate=1e-3)
    body = body_of(store, SCHEMES["plot" if name == "hplm" else name])
    before = {key: tensor.clone() for key, tensor in body.state_dict().items()}
    trained = finetune(body, data, options_of(name, own), show_progress=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in trained.body.state_dict().items())
    assert all(float(slot["ffn_in/b"].detach().abs().max()) > 0 for slot in trained.model.adapters)
    assert len(trained.model.adapters) == store.config.upper_layers and 0.3 < trained.report["change_held"] < 1
    learned = {key for key, tensor in body.state_dict().items() if not torch.equal(tensor, before[key])}
    above = ("layers.2.", "layers.3.") if name == "adapter" else ("upper.layers.0.", "upper.layers.1.")
    assert learned and all(key.startswith(above) and key.endswith("weight") and "norm" not in key for key in learned)
    kept = trained.report["exams"][trained.report["kept_epoch"] - 1]
    assert trained.scores.main == pytest.approx(kept["score"], abs=0.02)  # the stored adapter was scored during the training


def test_schemes_learn_from_the_tenants_own_data_and_no_other(store, tmp_path, monkeypatch):
    """From any working folder. A report without a digest is trusted."""
    rng = random.Random(3)
    parts = ("train", "other", "test")
    train, other, test = (write(tmp_path / f"{part}.jsonl", [classified(rng) for _ in range(40)]) for part in parts)
    monkeypatch.chdir(tmp_path)
    build_tenant(store, "own", "root", "classify", Path(train.name), rank=0, epochs=1, device=CPU, show_progress=False)
    monkeypatch.chdir("/")
    evaluation = evaluate_tenant(store, "own", test, CPU, show_progress=False)

    def compared(**files):
        return score_schemes(store, evaluation, ["shared"], CPU, show_progress=False, **files)["shared"].rows

    assert compared() == 40
    moved = train.rename(tmp_path / "moved.jsonl")
    assert compared(train_file=moved) == 40
    for files, option in (({"train_file": other}, "train"), ({"train_file": moved, "dev_file": other}, "dev")):
        with pytest.raises(InvalidInput, match=mentioning(other, "'own'", f"--{option}")):
            compared(**files)
    train.write_text(other.read_text())
    with pytest.raises(InvalidInput, match=mentioning(train, "'own'", "--train")):
        compared()
    known = store.report(evaluation.tenant)
    del known["training"]["digest"], known["dev"]["digest"]
    monkeypatch.setattr(Store, "report", lambda *_: known)
    assert compared() == 40
    other.write_text(other.read_text().replace("left", "up"))
    with pytest.raises(InvalidInput, match=mentioning(other, "'own'")):
        compared(train_file=other)


@pytest.mark.parametrize("name", ["distil", "tiny-half", "tiny-third"])
def test_a_student_has_fewer_layers_and_is_scored_as_others(store, data, name):
    own = TrainingOptions(epochs=1, rank=4)
    trained = train_scheme(store, data, name, own, show_progress=False)
    assert len(trained.body.layers) == max(1, round(SCHEMES[name].kept * 4)) < 4
    assert 0 <= trained.scores.main <= 1 and not trained.model.adapters
    assert options_of(name, own) == options_of("dedicated", own)


def test_a_student_starts_from_its_teachers_layers(store, data):
    teacher = whole_body(store).eval()
    pack = data.reader.pack(data.train, np.arange(len(data.train.texts)), CPU, False)
    with torch.no_grad():
        assert torch.equal(teacher.with_layers(range(4))(pack, None), teacher(pack, None))
        upper = teacher.with_layers([0, 1])
        read = states_of(teacher, pack)[2][pack.reading]
        assert torch.allclose(upper(pack, None), read, atol=1e-5)
    assert (evenly(6, 3), evenly(6, 2), evenly(12, 4)) == ([0, 2, 4], [1, 4], [1, 4, 7, 10])
    before = teacher.layers[0].qkv.weight.clone()
    upper.layers[0].qkv.weight.data.zero_()
    assert torch.equal(teacher.layers[0].qkv.weight, before)
