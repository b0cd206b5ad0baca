"""Checkpoints that are fine-tuned, imported and exported by one command: each number is there once, and failures are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from demo.data import DemoData, DemoDomain, DemoTenant, stored
from research.imports.__main__ import main
from research.imports.cases import CASES, QUICK
from research.result_file import ResultFile
from tests.builder.checkpoints import save_bert
from tests.builder.stores import corpus
from tests.builder.training.small_tenants import made
from tests.support.device import DEVICE
from tests.support.message import mentions

pytestmark = pytest.mark.slow

LABELS = {"classify": ("left", "right"), "tag": ("B-P", "I-P", "O")}
SIZES = {"train": QUICK.train, "dev": QUICK.dev, "test": QUICK.test}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of two toy tasks."""
    folder = tmp_path_factory.mktemp("imports") / "work"
    data = folder / f"data-{QUICK.train}" / "docstrings"
    data.mkdir(parents=True)

    def write() -> DemoData:
        files = {task: {part: made(data, task, size, part) for part, size in SIZES.items()} for task in LABELS}
        tasks = (
            DemoTenant(f"toy-{task}", "toys", task, "?", LABELS[task], **files[task], majority_share=0.5) for task in LABELS
        )
        return DemoData((DemoDomain("toys", corpus(data, 1, 300), 300),), tuple(tasks))

    stored(data, {}, write)
    (folder.parent / "model").mkdir()
    save_bert(folder.parent / "model")
    return folder


def called(work: Path, *words: object) -> int:
    model, results = work.parent / "model", work.parent / "results.jsonl"
    given = ("--quick", "--at-once", 1, "--work", work, "--results", results, "--model", model, "--device", DEVICE)
    return main([str(word) for word in (*given, *words)])


def test_each_number_is_computed_once_and_shown(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(work, "--mixed", 1) == 0
    shown = capsys.readouterr().out
    found = {(run["task"], run["case"]): result for run, result in ResultFile(work.parent / "results.jsonl")}
    tasks = [f"toy-{task}" for task in LABELS]
    assert found.keys() == {(task, case) for task in tasks for case in ("imported", "labelled")} | {("mixed-0", "mixed")}
    for task in tasks:
        one = found[task, "imported"]
        assert one["exported"]["windowed_apart"] < 1e-3 and 0 <= one["exported"]["plain"] <= 1
        assert 0 <= one["agreement"] <= 1 and one["bytes"]["tenant"] < one["bytes"]["checkpoint"]
    assert mentions(shown, *tasks, "without labels", "1 mixed")
    shutil.rmtree(next(work.glob("*/root-2")))  # so that nothing could be computed at once
    assert called(work, "--mixed", 1) == 0 == called(work, "--finished")
    assert capsys.readouterr().out == 2 * shown and not [*work.glob("*/root-2")]


def test_a_trial_differs_in_its_option_and_a_failure_loses_no_other(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = ["norms", "like", "rank-64"]
    (broken := work / f"data-{QUICK.train}" / "docstrings" / "tag-test.jsonl").write_text("{}\n")
    assert called(work, "--cases", *trials, "imported") == 1
    out, err = capsys.readouterr()
    assert mentions(err, "toy-tag, norms", broken, 4) and mentions(out, *(CASES[trial].about for trial in trials))
    found = {run["case"]: run["options"] for run, _ in ResultFile(work.parent / "results.jsonl") if run["case"] in trials}
    assert len({str(options) for options in found.values()}) == 3
    assert mentions(out, "toy-classify") and called(work, "--cases", "none") == 1
    assert mentions(capsys.readouterr().err, "none", "imported")
