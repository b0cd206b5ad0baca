"""Tenants on a toy backbone: they learn every task, are scored as they are served, and are trained on."""

import html

import pytest
import torch

from builder.evaluation.tenant import evaluate_tenant
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.training.tenant import warnings_of
from testing.reference import Reference
from tests.builder.training.small_tenants import STILL, TASKS, change, learn, made, weights
from tests.support.device import DEVICE
from tests.support.message import mentions
from tests.tasks import same_labels

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trained")]  # the tenants are trained in one process


@pytest.fixture(scope="module")
def reference(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    export(trained[0], folder, ServingOptions(dtype="fp32"))
    return Reference.open(folder / trained[0].config.name / "1")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_learned_and_scored_as_it_is_served(trained, reference, name):
    """Answers equal those of the reference. The first test trains five tenants."""
    store, folder = trained
    task, texts, metric, least, _ = TASKS[name]
    evaluation = evaluate_tenant(store, name, folder / f"{name}-test.jsonl", DEVICE, show_progress=False)
    assert evaluation.scores.metric == metric and evaluation.scores.main > least
    for example, answered in zip(evaluation.texts.examples, evaluation.answers, strict=True):
        assert same_labels(task, answered, reference.answer(example.text, name, example.pair).labels)
    report = store.report(store.tenant(name))  # of how it has learned
    assert report["task"] == task and report["dev"][metric] > least
    assert (report["training"]["texts"], report["dev"]["texts"], report["seed"]) == (texts, 60, 0)
    exams = report["exams"]
    assert len(exams) == report["epochs_run"] and report["best_epoch"] <= report["kept_epoch"]
    assert report["kept_step"] == exams[report["kept_epoch"] - 1]["step"]
    assert report["epochs_run"] == 6 or report["epochs_run"] - report["best_epoch"] == 3  # the patience
    assert name != "cut" or (0.2 < exams[0]["change_held"] < 1 and 0.2 < report["change_held"] <= 1)
    assert (store.tenant_folder(name, 1) / "training.png").read_bytes().startswith(b"\x89PNG")
    check_page((store.tenant_folder(name, 1) / "report.html").read_text(), report)


def check_page(page, report):
    """It shows what the report says of labels and mistakes, and loads nothing."""
    dev, by_label, mistakes = report["dev"], report["by_label"], report["mistakes"]
    assert "<script" not in page and "http" not in page and "data:image/png;base64," in page
    assert str(dev[dev["metric"]]) in page
    for shown in (*(row["label"] for row in by_label), *(mistake["text"] for mistake in mistakes)):
        assert html.escape(shown, quote=False) in page
    assert bool(by_label) == (report["task"] not in ("regress", "span"))
    if report["task"] == "classify":
        right = sum(row["right"] for row in by_label)
        assert right == round(dev["accuracy"] * dev["rows"]) and sum(row["wanted"] for row in by_label) == dev["rows"]
        assert len(mistakes) == min(10, dev["rows"] - right)


def test_training_changes_no_shared_layer(trained, learnable):
    for name in ("upper.safetensors", "lower/root-1.safetensors"):
        assert (trained[0].folder / name).read_bytes() == (learnable.folder / name).read_bytes()


@pytest.mark.parametrize("name", ["regress", "span-or-none", "cut"])
def test_a_version_is_trained_on_from_its_weights(trained_store, tmp_path, name):
    """With a learning rate of almost 0 the next version has the same weights, also where an adapter is cut."""
    store, (task, *_, options) = trained_store, TASKS[name]
    still = {"learning_rate": STILL, **({**options, "body_rate": STILL} if options else {})}
    more, dev = made(tmp_path, name, 40, "more"), made(tmp_path, name, 20, "new dev")
    report = store.report(learn(store, task, more, dev, tenant=name, epochs=1, **still))
    assert report["from_version"] == 1 and report["at_start"]["dev"] == pytest.approx(report["exams"][1]["score"], abs=1e-3)
    if name != "cut":
        before, after = weights(store, name, 1), weights(store, name, 2)
        largest = max(float(part.abs().max()) for part in before.values())
        for place, part in before.items():
            kept = slice(2 if len(part) == 3 else None)  # the threshold of no answer is chosen anew
            assert (part[kept] - after[place][kept]).abs().max() <= 2e-3 * largest  # values are normalised, and rounded
        return
    assert report["change_held"] > 0.999
    (old, _), (new, _) = (store.tenant_weights(store.tenant_version(name, version)) for version in (1, 2))
    for before, after in zip(old, new, strict=True):
        for place in ("query", "ffn_out"):
            products = [layer[f"{place}/b"].float() @ layer[f"{place}/a"].float() for layer in (before, after)]
            assert torch.allclose(*products, atol=2e-3 * float(products[0].abs().max())) and products[0].abs().max() > 0


def test_a_training_that_makes_the_tenant_worse_keeps_the_start(trained_store, tmp_path):
    store = trained_store
    more, dev = made(tmp_path, "multilabel", 40, "more"), made(tmp_path, "multilabel", 60, "new dev")
    ruined = learn(store, "multilabel", more, dev, tenant="multilabel", epochs=1, learning_rate=0.5, doubt=0.0)
    report = store.report(ruined)
    assert (report["best_epoch"], report["kept_epoch"]) == (0, 0)
    assert report["exams"][1]["score"] < report["at_start"]["dev"] and report["kept_step"] == 0
    assert change(store, ("multilabel", 1), ("multilabel", 2)) == 0
    assert any(mentions(warning, 1) for warning in warnings_of(report))
