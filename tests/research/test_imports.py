"""Checkpoints that are fine-tuned, imported and exported by one command: each number is there once, and failures are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from demo.data import stored
from research.imports.__main__ import main
from research.imports.cases import QUICK
from research.result_file import ResultFile
from tests.builder.checkpoints import save_bert
from tests.research.toys import LABELS, toy_data
from tests.support.device import DEVICE
from tests.support.message import mentions

SIZES = {"train": QUICK.train, "dev": QUICK.dev, "test": QUICK.test}


@pytest.mark.slow
def test_each_number_is_computed_once_and_a_failure_loses_no_other(tmp_path: Path, capsys) -> None:
    work, results = tmp_path / "work", tmp_path / "work/quick.jsonl"  # and not the file of the project
    data = work / f"data-{QUICK.train}" / "docstrings"
    data.mkdir(parents=True)
    test = stored(data, {}, lambda: toy_data(data, SIZES)).tenants[1].test
    (tmp_path / "model").mkdir()
    given = ["--quick", "--at-once", 1, "--work", work, "--model", save_bert(tmp_path / "model")]

    def called(*words: object) -> int:
        return main([str(word) for word in (*given, "--device", DEVICE, *words)])

    def found() -> dict:
        return {(run["task"], run["case"]): result for run, result in ResultFile(results)}

    readable = test.read_bytes()
    test.write_text("{}\n")
    assert called() == 1
    assert mentions(capsys.readouterr().err, "toy-tag, imported", test)
    assert {task for task, _ in found()} == {"toy-classify"}
    test.write_bytes(readable)
    assert called("--mixed", 1) == 0
    shown, numbers = capsys.readouterr().out, found()
    assert numbers.keys() == {(task, case) for task in LABELS for case in ("imported", "labelled")} | {("mixed-0", "mixed")}
    for task in LABELS:
        one = numbers[task, "imported"]
        assert one["exported"]["windowed_apart"] < 1e-3 and 0 <= one["exported"]["plain"] <= 1
        assert 0 <= one["agreement"] <= 1 and one["bytes"]["tenant"] < one["bytes"]["checkpoint"]
    assert mentions(shown, *LABELS, "without labels", "1 mixed")
    shutil.rmtree(next(work.glob("*/root")))  # so that nothing could be computed at once
    assert called("--mixed", 1) == 0 == called("--finished")
    assert capsys.readouterr().out == 2 * shown and not [*work.glob("*/root")]
