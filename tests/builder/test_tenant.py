"""Tenants on a toy backbone: they learn both tasks, are scored as they are served, and refuse what cannot be learned."""

import json
import random

import numpy as np
import pytest
import torch

from builder.data import read_labelled
from builder.export import export
from builder.model_configs import ServingOptions
from builder.packs import packs
from builder.random_store import tokenizer_json
from builder.store import Store
from builder.tenant import build_tenant, evaluate_tenant
from builder.training.examples import UNREAD, Reader
from builder.training.finetuning import TenantModel
from hplm.engine.reference import Reference
from hplm.errors import InvalidInput
from hplm.model.checkpoint import random_backbone
from tests.builder.branches import build, some_lines
from tests.toy import CONFIG, WORDS

CPU = torch.device("cpu")
PARTS = WORDS[:8]


def classified(rng):
    """Which of two words is among the others."""
    label = rng.choice(["left", "right"])
    words = rng.choices(WORDS[50:], k=rng.randint(2, 9))
    words.insert(rng.randrange(len(words) + 1), WORDS[0] if label == "left" else WORDS[1])
    return {"text": " ".join(words), "label": label}


def tagged(rng):
    """Which words are of the first eight."""
    tokens = [rng.choice(PARTS if rng.random() < 0.4 else WORDS) for _ in range(rng.randint(2, 12))]
    return {"tokens": tokens, "tags": ["PART" if word in PARTS else "O" for word in tokens]}


MAKERS = {"classify": classified, "tag": tagged}


def write(path, examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def made(folder, task, count, seed):
    rng = random.Random(seed)
    return write(folder / f"{task}-{seed}.jsonl", [MAKERS[task](rng) for _ in range(count)])


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store")


def make_store(folder):
    lower, upper = random_backbone(CONFIG)
    with torch.no_grad():
        for stack in (lower, upper):
            for name, parameter in stack.named_parameters():
                if "norm" not in name:
                    parameter.mul_(8)  # at this size BERT's own initial weights let no token hear of another
    store = Store.create(folder, "m", CONFIG, tokenizer_json(CONFIG.vocabulary), lower, upper)
    build(store, folder, "root", some_lines(200, seed=1))
    return store


def learn(store, task, train, dev=None, tenant="acme", **options):
    return build_tenant(store, tenant, "root", task, train, dev, rank=8, device=CPU, show_progress=False, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with a tenant of each task, and the file each is tested on."""
    folder = tmp_path_factory.mktemp("trained")
    store, tests = make_store(folder / "store"), {}
    for task in MAKERS:
        train, dev = made(folder, task, 500, 1), made(folder, task, 100, 2)
        learn(store, task, train, dev, tenant=task, epochs=8)
        tests[task] = made(folder, task, 100, 3)
    return store, tests


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_training_beats_the_majority(trained, task):
    store, tests = trained
    scores = evaluate_tenant(store, task, tests[task], CPU, show_progress=False)
    assert scores["accuracy"] > scores["majority_share"] + 0.1
    assert scores["macro_f1"] > 0.6
    report = next(store.report(tenant) for tenant in store.tenants() if tenant.id == task)
    assert report["dev"]["accuracy"] > report["dev"]["majority_share"] + 0.1
    assert set(report["training"]["label_counts"]) == ({"left", "right"} if task == "classify" else {"O", "PART"})
    assert report["training"]["texts"] == 500 and report["seed"] == 0


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_what_is_scored_is_what_is_served(trained, tmp_path, task):
    """Packed training-side logits of the stored weights against the reference's, text by text."""
    store, tests = trained
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    reference = Reference.open(tmp_path / "repository" / CONFIG.name / "1")
    tenant = next(tenant for tenant in store.tenants() if tenant.id == task)
    labelled = read_labelled(tests[task], task)
    reader = Reader(store, tenant.domain, tenant.domain_version)
    texts = reader.read(labelled, task, tenant.labels, show_progress=False)
    model = TenantModel(CONFIG, tenant.adapter_layout(CONFIG), tenant.head_layout(CONFIG), seed=0)
    model.load(*store.tenant_weights(tenant))
    right = total = 0
    for chosen in packs(texts.lengths, 400, 20):
        pack = reader.pack(texts, chosen, CPU)
        with torch.inference_mode():
            logits = model(store.upper().eval(), pack)
        expected = torch.cat([reference.forward(labelled.examples[i].text, task) for i in chosen])
        assert torch.allclose(logits, expected, atol=1e-3)
        right += int((expected.argmax(1) == pack.targets).sum())
        total += len(expected)
    scores = evaluate_tenant(store, task, tests[task], CPU, show_progress=False)
    assert scores["accuracy"] == pytest.approx(right / total, abs=1e-4)


def test_the_same_seed_gives_the_same_bytes(store, tmp_path):
    train = made(tmp_path, "classify", 80, 1)
    files = []
    for tenant, seed in (("one", 4), ("two", 4), ("three", 5)):
        learn(store, "classify", train, tenant=tenant, epochs=2, seed=seed)
        folder = store.tenant_folder(tenant, 1)
        files.append([(folder / name).read_bytes() for name in ("adapter.safetensors", "head.safetensors")])
    assert files[0] == files[1] != files[2]


def test_shared_layers_are_not_touched(store, tmp_path):
    before = (store.folder / "upper.safetensors").read_bytes()
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    assert (store.folder / "upper.safetensors").read_bytes() == before


def test_rank_0_is_a_head_alone(store, tmp_path):
    train = made(tmp_path, "tag", 60, 1)
    tenant = build_tenant(store, "bare", "root", "tag", train, rank=0, epochs=1, device=CPU, show_progress=False)
    adapter, head = store.tenant_weights(tenant)
    assert adapter is None and head["weight"].shape == (2, CONFIG.hidden) and head["weight"].dtype == torch.float16


def test_an_update_is_the_next_version_with_the_same_answers(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    assert learn(store, "classify", train, epochs=1).version == 1
    assert learn(store, "classify", made(tmp_path, "classify", 60, 2), epochs=1).version == 2
    more = write(tmp_path / "more.jsonl", [{"text": "a b", "label": label} for label in "xyxy"])
    with pytest.raises(InvalidInput, match=r"'acme' has a version 2 .* labels \['x', 'y'\].*no examples of .*another --id"):
        learn(store, "classify", more, epochs=1)
    with pytest.raises(InvalidInput, match="its task is classify, not tag"):
        learn(store, "tag", made(tmp_path, "tag", 60, 1), epochs=1)
    assert [tenant.version for tenant in store.tenants()] == [2]


def test_labels_unseen_in_training_are_named_with_their_line(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    other = write(tmp_path / "other.jsonl", [{"text": "a", "label": "left"}, {"text": "b", "label": "up"}])
    with pytest.raises(InvalidInput, match=r"other\.jsonl:2: label 'up' does not occur in .*classify-1\.jsonl"):
        learn(store, "classify", train, other)
    learn(store, "classify", train, epochs=1)
    with pytest.raises(InvalidInput, match=r"other\.jsonl:2: label 'up' does not occur in the training data of tenant 'acme'"):
        evaluate_tenant(store, "acme", other, CPU, show_progress=False)


def test_what_cannot_be_trained_is_refused(store, tmp_path):
    one = write(tmp_path / "one.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])
    with pytest.raises(InvalidInput, match=r"one\.jsonl: every label is 'x'"):
        learn(store, "classify", one)
    few = write(tmp_path / "few.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    with pytest.raises(InvalidInput, match=r"few\.jsonl: too few examples to set some aside for dev"):
        learn(store, "classify", few)
    with pytest.raises(InvalidInput, match="tenant 'nobody' is not in"):
        evaluate_tenant(store, "nobody", few, CPU, show_progress=False)
    with pytest.raises(InvalidInput, match="task 'guess' is not known"):
        learn(store, "guess", few)


def test_long_texts_are_cut_and_counted(store, tmp_path):
    rng = random.Random(0)
    examples = [classified(rng) for _ in range(40)]
    exact, longer = CONFIG.positions - 2, CONFIG.positions - 1
    examples += [{"text": " ".join(WORDS[:1] * length), "label": "left"} for length in (exact, longer, 300)]
    train = write(tmp_path / "long.jsonl", examples)
    report = store.report(learn(store, "classify", train, made(tmp_path, "classify", 20, 2), epochs=1))
    assert report["training"]["texts_cut"] == 2 and report["dev"]["texts_cut"] == 0


def test_a_word_without_a_token_is_never_right(store, tmp_path):
    """A zero-width space is a word to a client and nothing to the tokenizer."""
    path = write(tmp_path / "odd.jsonl", [{"tokens": [WORDS[0], "\u200b", WORDS[60]], "tags": ["PART", "O", "O"]}])
    labelled = read_labelled(path, "tag")
    reader = Reader(store, "root", 1)
    texts = reader.read(labelled, "tag", ["O", "PART"], show_progress=False)
    assert texts.texts[0].reading.tolist() == [1, UNREAD, 2]
    assert reader.pack(texts, np.array([0]), CPU).targets.tolist() == [1, UNREAD, 0]
    learn(store, "tag", made(tmp_path, "tag", 200, 1), epochs=1)
    assert evaluate_tenant(store, "acme", path, CPU, show_progress=False)["accuracy"] <= 0.6667
