"""`hplm calibrate`: tenants whose right answers are drawn from their own logits at a known temperature."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from builder.evaluation.calibration import calibrate_tenant
from builder.evaluation.fitting import Cases, fitted
from builder.store.seen import SeenTexts
from builder.tasks.division import seen_after
from builder.tasks.tasks import training_task
from hplm.calibration import Calibration
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from hplm.tasks.answers import softmax
from testing.random_store import random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.builder.training.small_tenants import write
from tests.cli.commands import run
from tests.support.device import DEVICE
from tests.support.killed import content
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

FP32 = resolve_precision("fp32", DEVICE)
HOT = 4.0  # the temperature of the truth: the logits are far too sure
TEXTS = 300
TENANTS = {"classify": "pair", "multilabel": "many", "tag": "word", "span": "perhaps"}


@pytest.fixture
def store(tasks_store):
    return tasks_store


@pytest.fixture(scope="module")
def files(tasks, tmp_path_factory):
    """Returns a labelled file a task."""
    folder, reference, rng = tmp_path_factory.mktemp("texts"), Reference.open(tasks.folder), np.random.default_rng(0)
    texts = list(dict.fromkeys(random_text(random.Random(number), 8) for number in range(2 * TEXTS)))[:TEXTS]
    found = {}
    for task, tenant_id in TENANTS.items():
        labels = tasks.store.tenant(tenant_id).labels
        lines = [labelled(task, reference, tenant_id, labels, text, rng) for text in texts]
        found[task] = write(folder / f"{task}.jsonl", lines)
    return found


def labelled(task, reference, tenant_id, labels, text, rng):
    if task == "span":
        passage = random_text(random.Random(text), 20)
        answer = reference.answer(text, tenant_id, passage)
        (start, stop) = answer.spans[0] if rng.random() < 0.6 else (0, passage.find(" ") if " " in passage else len(passage))
        right = {"text": [passage[start:stop]] if stop else [], "answer_start": [start] if stop else []}
        return {"text": text, "text_pair": passage, "answers": right}
    logits = reference.forward(text, tenant_id).numpy()
    drawn = [labels[rng.choice(len(labels), p=row / row.sum())] for row in softmax(logits.astype(np.float64) / HOT)]
    if task == "multilabel":
        held = rng.random(len(labels)) < 1 / (1 + np.exp(-logits[0] / HOT))
        return {"text": text, "labels": [label for label, holds in zip(labels, held, strict=True) if holds]}
    return {"text": text, "label": drawn[0]} if task == "classify" else {"tokens": text.split(), "tags": drawn}


def calibrated(store, task, files, precision=FP32):
    return calibrate_tenant(store, TENANTS[task], files[task], precision, DEVICE)


def calibration_of(store, task):
    return store.knowledge(store.tenant(TENANTS[task])).calibration


@pytest.mark.parametrize("task", TENANTS)
def test_the_temperature_of_the_truth_is_found(store, files, task):
    report, _ = calibrated(store, task, files)
    assert task == "span" or calibration_of(store, task).temperature == pytest.approx(HOT, rel=0.35)
    assert task != "span" or 0.5 < report["right"] < 0.9
    assert report["after"]["nll"] < report["before"]["nll"] and report["after"]["ece"] < report["before"]["ece"]
    assert report["texts"] == TEXTS


def test_a_temperature_that_is_worse_on_other_texts_is_not_kept():
    """Right classes are drawn from the logits, so that the true temperature is 1 and a fit follows chance."""
    rng, plain, kept = np.random.default_rng(0), Calibration(), []
    for _ in range(20):
        logits = rng.normal(size=(100, 1, 3))
        classes = np.array([rng.choice(3, p=row) for row in softmax(logits[:, 0])])
        chosen = logits.argmax(2)
        cases = Cases(logits, chosen, chosen[:, 0] == classes, classes)
        found = fitted(cases)
        assert found.losses.mean() <= cases.losses(plain).mean()
        kept.append(found.calibration == plain)
    assert any(kept) and not all(kept)


def test_the_precision_that_serves_makes_the_logits(store, files):
    found = {}
    for dtype in ("fp32", "bf16", "int8"):
        report, is_new = calibrated(store, "classify", files, resolve_precision(dtype, DEVICE))
        assert is_new
        found[dtype] = report["after"]["nll"], calibration_of(store, "classify")
    nll = [nll for nll, _ in found.values()]
    assert len({calibration for _, calibration in found.values()}) == 3 and max(nll) - min(nll) < 0.05


def test_the_same_command_changes_nothing(store, files, capsys):
    command = ["calibrate", "--store", store.folder, "--id", "pair", "--texts", files["classify"], "--dtype", "fp32"]
    first, before = run(capsys, *command), content(store.folder)
    again = run(capsys, *command)
    assert first == {**again, "changed": True} != again and content(store.folder) == before
    assert store.tenant_versions("pair") == [1, 2] and store.knowledge(store.tenant_version("pair", 1)).calibration is None
    random_tenant(store, replace(store.tenant("pair"), version=3), 0.3, seed=9)
    assert store.knowledge(store.tenant("pair")).calibration is None  # another version has no calibration


def test_texts_that_a_version_or_its_start_has_seen_are_left_out(store, files):
    """Their files may be gone."""
    texts, file = training_task("classify").read(files["classify"]), store.tenant_folder("pair", 1) / "seen.npz"
    (seen := seen_after(seen_after(SeenTexts(), texts[:80], []), texts[80:120], texts[120:150])).save(file)
    report, _ = calibrated(store, "classify", files)
    assert (report["left_out"], report["texts"]) == (150, 150)
    assert store.seen(store.tenant("pair")) == seen, "the next version has the same weights"
    seen_after(seen, texts[150:], []).save(store.tenant_folder("pair", 2) / "seen.npz")
    with pytest.raises(InvalidInput, match=mentioning(files["classify"], 300, "'pair'", 0, 100)):
        calibrated(store, "classify", files, resolve_precision("bf16", DEVICE))
