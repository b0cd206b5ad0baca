"""`hplm calibrate`: tenants whose right answers are drawn from their own logits at a known temperature."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from builder.evaluation.calibration import calibrate_tenant
from builder.store.calibrations import read_calibrated
from builder.store.resumable import digest_of
from builder.store.store import Store
from hplm.cli.main import main
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from hplm.tasks import TASKS, softmax
from testing.random_store import random_tenant
from testing.reference import Reference
from testing.toy import random_text
from tests.support.message import mentioning, mentions
from tests.tasks import make_tasks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
HOT = 4.0  # the temperature of the truth: the logits are far too sure
TEXTS = 300
TENANTS = {"classify": "pair", "multilabel": "many", "tag": "word", "regress": "mark", "span": "perhaps"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def store(toy, tmp_path):
    return Store(shutil.copytree(toy.store.folder, tmp_path / "store"))


@pytest.fixture(scope="module")
def files(toy, tmp_path_factory):
    """Returns a labelled file a task."""
    folder, reference, rng = tmp_path_factory.mktemp("texts"), Reference.open(toy.folder), np.random.default_rng(0)
    texts = list(dict.fromkeys(random_text(random.Random(number), 8) for number in range(2 * TEXTS)))[:TEXTS]
    found = {}
    for task, tenant_id in TENANTS.items():
        labels = toy.store.tenant(tenant_id).labels
        lines = [labelled(task, reference, tenant_id, labels, text, rng) for text in texts]
        found[task] = folder / f"{task}.jsonl"
        found[task].write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    if task == "regress":
        return {"text": text, "label": float(logits[0, 0] + rng.normal(0, 0.5))}
    if task == "multilabel":
        held = rng.random(len(labels)) < 1 / (1 + np.exp(-logits[0] / HOT))
        return {"text": text, "labels": [label for label, holds in zip(labels, held, strict=True) if holds]}
    return {"text": text, "label": drawn[0]} if task == "classify" else {"tokens": text.split(), "tags": drawn}


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("task", ["classify", "multilabel", "tag"])
def test_the_temperature_of_the_truth_is_found(store, files, task):
    calibrated, _ = calibrate_tenant(store, TENANTS[task], files[task], FP32, CPU, show_progress=False)
    report = calibrated.report
    if task != "tag":  # of several labels: a Dirichlet map may do as well
        assert calibrated.calibration.temperature == pytest.approx(HOT, rel=0.35)
    assert report["after"]["nll"] < report["before"]["nll"] and report["after"]["ece"] < report["before"]["ece"]
    assert sum(one["count"] for one in report["after"]["bins"]) == report["texts"] == TEXTS


def test_an_answer_from_a_passage_is_right_if_both_ends_are(store, files):
    report = calibrate_tenant(store, "perhaps", files["span"], FP32, CPU, show_progress=False)[0].report
    assert 0.5 < report["right"] < 0.9 and report["after"]["ece"] < report["before"]["ece"]
    assert report["after"]["nll"] < report["before"]["nll"]


def test_a_number_is_right_within_delta(store, files):
    calibrated, _ = calibrate_tenant(store, "mark", files["regress"], FP32, CPU, 0.5, show_progress=False)
    assert calibrated.calibration.shares == pytest.approx([0.683] * len(calibrated.calibration.shares), abs=0.2)
    assert (calibrated.report["before"], calibrated.report["delta"]) == (None, 0.5)
    values = [json.loads(line)["label"] for line in files["regress"].read_text().splitlines()]
    calibrated, _ = calibrate_tenant(store, "mark", files["regress"], FP32, CPU, show_progress=False)
    assert calibrated.report["delta"] == pytest.approx(0.5 * np.std(values))


def test_the_precision_that_serves_makes_the_logits(store, files):
    found = {}
    for dtype in ("fp32", "bf16", "int8"):
        calibrated, is_new = calibrate_tenant(
            store, "pair", files["classify"], resolve_precision(dtype, CPU), CPU, show_progress=False
        )
        assert is_new and read_calibrated(store, store.tenant("pair")) == calibrated
        found[dtype] = calibrated.report["after"]["nll"], calibrated.calibration
    nll = [nll for nll, _ in found.values()]
    assert len({calibration for _, calibration in found.values()}) == 3 and max(nll) - min(nll) < 0.05


def test_the_same_command_changes_nothing(store, files, capsys, tmp_path):
    command = ["calibrate", "--store", store.folder, "--id", "pair", "--texts", files["classify"], "--dtype", "fp32"]
    first = run(capsys, *command)
    file = store.tenant_folder("pair", 1) / "calibration.json"
    content, at = file.read_bytes(), file.stat().st_mtime_ns
    again = run(capsys, *command, "--picture", tmp_path / "picture.png")
    assert (first.pop("changed"), again.pop("changed")) == (True, False) and first == again
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (content, at)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(word) for word in command]) == 0
    assert mentions(capsys.readouterr().out, "ECE", "NLL", "before", "after", TEXTS)
    random_tenant(store, replace(store.tenant("pair"), version=2), 0.3, seed=9)
    assert read_calibrated(store, store.tenant("pair")) is None  # a new version has no calibration


def test_texts_of_the_training_are_left_out(store, files, tmp_path):
    lines = files["classify"].read_text().splitlines(keepends=True)
    train, dev, moved = tmp_path / "train.jsonl", tmp_path / "dev.jsonl", tmp_path / "moved.jsonl"
    train.write_text("".join(lines[:80]))
    dev.write_text("".join(lines[80:150]))
    write_reports(store, {"training": train, "dev": train, "from_version": 0}, {"training": dev, "from_version": 1})
    calibrated, _ = calibrate_tenant(store, "pair", files["classify"], FP32, CPU, show_progress=False)
    assert (calibrated.report["left_out"], calibrated.report["texts"]) == (150, 150)
    train.rename(moved)
    with pytest.raises(InvalidInput, match=mentioning("'pair'", train, "--seen")):
        calibrate_tenant(store, "pair", files["classify"], FP32, CPU, show_progress=False)
    assert not calibrate_tenant(store, "pair", files["classify"], FP32, CPU, seen=[moved], show_progress=False)[1]
    with pytest.raises(InvalidInput, match=mentioning(files["classify"], 300, "'pair'", 0, 100)):
        calibrate_tenant(store, "pair", files["classify"], FP32, CPU, seen=[moved, files["classify"]], show_progress=False)


def write_reports(store, *parts):
    """Writes a version of the tenant `pair` for each report, whose files get their digests."""
    for version, report in enumerate(parts, start=1):
        if version > 1:
            random_tenant(store, replace(store.tenant("pair"), version=version), 0.3, seed=version)
        described = {
            name: value if name == "from_version" else {"file": str(value), "digest": digest_of(value)}
            for name, value in report.items()
        }
        (store.tenant_folder("pair", version) / "report.json").write_text(json.dumps(described))


def test_bad_input_is_named(store, files, tmp_path, capsys):
    few, strange, flat = tmp_path / "few.jsonl", tmp_path / "strange.jsonl", tmp_path / "flat.jsonl"
    few.write_text("".join(files["classify"].read_text().splitlines(keepends=True)[:99]))
    strange.write_text('{"text": "a", "label": "other"}\n')
    flat.write_text('{"text": "a", "label": 3}\n' * 100)
    for arguments, named in [
        (["--id", "nobody", "--texts", few], ["'nobody'"]),
        (["--id", "pair", "--texts", few], [few, 99, 100]),
        (["--id", "pair", "--texts", strange], [strange, "'other'"]),
        (["--id", "word", "--texts", few], [few, "'tokens'"]),
        (["--id", "pair", "--texts", tmp_path / "missing"], ["missing"]),
        (["--id", "pair", "--texts", few, "--delta", "1"], ["delta 1", "'pair'", "classify"]),
        (["--id", "mark", "--texts", few, "--delta", "nan"], ["delta nan"]),
        (["--id", "mark", "--texts", flat], [flat, "--delta"]),
        (["--id", "pair", "--texts", few, "--picture", "x.bmp"], ["x.bmp"]),
    ]:
        command = ["calibrate", "--store", store.folder, "--dtype", "fp32", *arguments]
        assert main([str(word) for word in command]) == 1
        assert mentions(capsys.readouterr().err, *named), (arguments, named)


def test_every_task_with_labels_can_be_calibrated():
    assert {name for name, task in TASKS.items() if task.evidence is not None} == TENANTS.keys()
