"""Tenants on a toy backbone: they learn every task, and are scored as they are served."""

import random

import numpy as np
import pytest
import torch

from builder.evaluation.tenant import evaluate_tenant
from builder.packed_batches import packed_batches
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.verification import store_parts
from builder.training import finetuning
from builder.training.bodies import PlotBody
from builder.training.examples import Reader
from builder.training.model import TenantModel
from builder.training.objectives import UNREAD
from builder.training.scores import Scores
from builder.training.tasks import training_task
from builder.training.tenant import build_tenant, warnings_of
from hplm.errors import InvalidInput
from testing.reference import Reference
from testing.toy import CONFIG, WORDS
from tests.builder.training.small_tenants import CPU, CUT, TASKS, classified, learn, made, make_store, write
from tests.support.message import mentioning, mentions
from tests.tasks import same_labels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with a tenant of each task, and the test file of each."""
    folder = tmp_path_factory.mktemp("trained")
    store, tests = make_store(folder / "store"), {}
    for name, (task, maker, _, _) in TASKS.items():
        rng = random.Random(name)
        train, dev, tests[name] = (
            write(folder / f"{name}-{part}.jsonl", [maker(rng) for _ in range(count)])
            for part, count in (("train", 360), ("dev", 60), ("test", 60))
        )
        learn(store, task, train, dev, tenant=name, epochs=6, **(CUT if name.startswith("cut") else {}))
    return store, tests


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_learned(trained, name):
    store, tests = trained
    task, _, metric, least = TASKS[name]
    scores = evaluate_tenant(store, name, tests[name], CPU, show_progress=False).scores
    assert scores.metric == metric and scores.main > least
    report = next(store.report(tenant) for tenant in store.tenants() if tenant.id == name)
    assert report["task"] == task and report["dev"][metric] > least
    assert report["training"]["texts"] == 360 and report["seed"] == 0
    assert [entry["epoch"] for entry in report["history"]] == list(range(1, report["epochs_run"] + 1))
    best = max(report["history"], key=lambda entry: (entry["dev"], -entry["dev_loss"]))
    assert report["best_epoch"] == best["epoch"] <= report["kept_epoch"]
    assert (store.tenant_folder(name, 1) / "training.png").read_bytes().startswith(b"\x89PNG")


def test_scores_are_above_the_majority_share(trained):
    store, tests = trained
    for name in ("classify", "tag"):
        values = evaluate_tenant(store, name, tests[name], CPU, show_progress=False).scores.values
        assert values["accuracy"] > values["majority_share"] + 0.1


@pytest.mark.parametrize("name", TASKS)
def test_scored_answers_equal_served_answers(trained, tmp_path, name):
    """Answers and logits that are computed in packs equal those of the reference, text by text."""
    store, tests = trained
    export(store, tmp_path / "repository", ServingOptions(dtype="fp32"))
    reference = Reference.open(tmp_path / "repository" / CONFIG.name / "1")
    evaluation = evaluate_tenant(store, name, tests[name], CPU, show_progress=False)
    tenant, examples = evaluation.tenant, evaluation.labelled.examples
    model = TenantModel(tenant.adapter_layout(CONFIG), tenant.head_layout(CONFIG), seed=0)
    model.load(*store.tenant_weights(tenant))
    reader = Reader(store, tenant.domain, tenant.domain_version)
    for chosen in packed_batches(evaluation.texts.lengths, 400, 20):
        pack = reader.pack(evaluation.texts, chosen, CPU)
        with torch.inference_mode():
            logits = model(PlotBody(store.upper().eval(), CONFIG.heads), pack)
        expected = torch.cat([reference.forward(examples[i].text, name, examples[i].pair) for i in chosen])
        assert torch.allclose(logits, expected, atol=1e-3)
    for example, answered in zip(examples, evaluation.answers, strict=True):
        assert same_labels(tenant.task, answered, reference.answer(example.text, name, example.pair).labels)


def test_the_same_seed_gives_the_same_bytes(store, tmp_path):
    train = made(tmp_path, "classify", 80, 1)
    files = []
    for tenant, seed in (("one", 4), ("two", 4), ("three", 5)):
        learn(store, "classify", train, tenant=tenant, epochs=2, seed=seed)
        folder = store.tenant_folder(tenant, 1)
        files.append([(folder / name).read_bytes() for name in ("adapter.safetensors", "head.safetensors")])
    assert files[0] == files[1] != files[2]


def test_of_epochs_with_dev_scores_that_do_not_differ_surely_the_last_is_kept(store, tmp_path, monkeypatch):
    """With 100 texts, 0.80 and 0.77 count as equal, but 0.80 and 0.75 do not."""
    train, dev = made(tmp_path, "classify", 60, 1), made(tmp_path, "classify", 20, 2)
    kept = {}
    for doubt in (0.0, 1.0):
        for tenant, told in (("near", (0.80, 0.77, 0.75)), ("far", (0.80, 0.75, 0.74)), ("rising", (0.70, 0.80, 0.79))):
            values = iter([*told, told[-1]])
            monkeypatch.setattr(
                finetuning, "evaluate", lambda *_, values=values: (Scores(100, "accuracy", {"accuracy": next(values)}), 1.0)
            )
            tenant = f"{tenant}-{doubt:g}"
            learn(store, "classify", train, dev, tenant=tenant, epochs=3, patience=3, doubt=doubt)
            report = next(store.report(other) for other in store.tenants() if other.id == tenant)
            kept[tenant] = (report["best_epoch"], report["kept_epoch"])
    assert kept == {
        "near-0": (1, 1), "far-0": (1, 1), "rising-0": (2, 2), "near-1": (1, 2), "far-1": (1, 1), "rising-1": (2, 3)
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, CUT])
def test_shared_layers_do_not_change(store, tmp_path, options):
    before = (store.folder / "upper.safetensors").read_bytes()
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1, **options)
    assert (store.folder / "upper.safetensors").read_bytes() == before


def test_a_cut_adapter_works_on_all_projections_or_on_the_given_places(store, tmp_path):
    train, held = made(tmp_path, "classify", 60, 1), []
    for tenant, options in (("all", {}), ("some", {"places": ("query", "ffn_in")})):
        made_of = learn(store, "classify", train, tenant=tenant, epochs=2, **CUT, **options)
        adapter, _ = store.tenant_weights(made_of)
        assert adapter[0].keys() == {f"{place}/{side}" for place in made_of.places for side in "ab"}
        held.append(store.report(made_of)["change_held"])
    assert made_of.places == ("query", "ffn_in") and len(adapter) == CONFIG.upper_layers
    assert all(0.2 < share < 1 for share in held) and held[0] != held[1]


def test_a_bottleneck_cannot_be_cut_from_upper_layers(store, tmp_path):
    with pytest.raises(InvalidInput, match=mentioning("'bottleneck'", "lora")):
        learn(store, "classify", made(tmp_path, "classify", 60, 1), body_rate=1e-4)


def test_rank_0_trains_only_a_head(store, tmp_path):
    train = made(tmp_path, "tag", 60, 1)
    tenant = build_tenant(store, "bare", "root", "tag", train, rank=0, epochs=1, device=CPU, show_progress=False)
    adapter, head = store.tenant_weights(tenant)
    assert adapter is None and head["weight"].shape == (2, CONFIG.hidden) and head["weight"].dtype == torch.float16
    with pytest.raises(InvalidInput, match="--rank"):
        build_tenant(store, "more", "root", "tag", train, rank=0, body_rate=1e-4, device=CPU, show_progress=False)


def test_a_trained_store_can_be_verified(store, tmp_path):
    learn(store, "classify", made(tmp_path, "classify", 60, 1), epochs=1)
    parts = [part for part in store_parts(store.folder) if "tenants" in part.path.parts]
    assert {"tenant.json", "head.safetensors"} < {part.path.name for part in parts}
    assert (parts[0].path.parent / "training.png").exists()
    assert [wrong for part in parts for wrong in part.check(part.path, lambda done: None)] == []


def test_an_update_is_the_next_version_with_the_same_answers(store, tmp_path):
    train = made(tmp_path, "classify", 60, 1)
    assert learn(store, "classify", train, epochs=1).version == 1
    assert learn(store, "classify", made(tmp_path, "classify", 60, 2), epochs=1).version == 2
    more = write(tmp_path / "more.jsonl", [{"text": text, "label": label} for text, label in zip("abcd", "xyxy", strict=True)])
    with pytest.raises(InvalidInput, match=mentioning("'acme'", 2, "['x', 'y']", "['left', 'right']", "--id")):
        learn(store, "classify", more, epochs=1)
    with pytest.raises(InvalidInput, match=mentioning("'acme'", "classify", "tag", "--id")):
        learn(store, "tag", made(tmp_path, "tag", 60, 1), epochs=1)
    assert [tenant.version for tenant in store.tenants()] == [2]


def test_unanswerable_questions_are_learned_and_served_as_such(trained):
    store, tests = trained
    tenant = store.tenant("span-or-none")
    assert tenant.labels == ["start", "end", "none"] and store.tenant("span").labels == ["start", "end"]
    values = evaluate_tenant(store, "span-or-none", tests["span-or-none"], CPU, show_progress=False).scores.values
    assert values["unanswerable_right"] > 0.6 and values["answerable_f1"] > 0.3
    always = evaluate_tenant(store, "span", tests["span-or-none"], CPU, show_progress=False).scores.values
    assert always["unanswerable_right"] == 0


def test_uneven_labels_are_reported(store, tmp_path):
    rng = random.Random(0)
    examples = [{"text": " ".join(rng.choices(WORDS, k=4)), "label": "rare" if i % 30 == 0 else "often"} for i in range(90)]
    report = store.report(learn(store, "classify", write(tmp_path / "u.jsonl", examples), epochs=1))
    assert report["imbalance"] > 20
    assert mentions(warnings_of(report)[0], "'often'")
    assert warnings_of({**report, "imbalance": 2.0}) == []


def test_long_texts_are_truncated_and_counted(store, tmp_path):
    rng = random.Random(0)
    examples = [classified(rng) for _ in range(40)]
    exact, longer = CONFIG.positions - 2, CONFIG.positions - 1
    examples += [{"text": " ".join(WORDS[:1] * length), "label": "left"} for length in (exact, longer, 300)]
    train = write(tmp_path / "long.jsonl", examples)
    report = store.report(learn(store, "classify", train, made(tmp_path, "classify", 20, 2), epochs=1))
    assert report["training"]["texts_cut"] == 2 and report["dev"]["texts_cut"] == 0


def test_a_word_without_a_token_counts_as_wrong(store, tmp_path):
    """A zero-width space is a word to a client and nothing to the tokenizer."""
    path = write(tmp_path / "odd.jsonl", [{"tokens": [WORDS[0], "\u200b", WORDS[60]], "tags": ["PART", "O", "O"]}])
    task = training_task("tag")
    reader = Reader(store, "root", 1)
    texts = reader.read(task.read(path), task, ["O", "PART"], show_progress=False)
    assert texts.texts[0].reading.tolist() == [1, UNREAD, 2]
    assert reader.pack(texts, np.array([0]), CPU).targets.tolist() == [1, UNREAD, 0]
    learn(store, "tag", made(tmp_path, "tag", 200, 1), epochs=1)
    assert evaluate_tenant(store, "acme", path, CPU, show_progress=False).scores.values["accuracy"] <= 0.6667
