"""A BERT that plain `transformers` fine-tuned is imported and compared; a second call changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.learning.limits import Budget
from builder.tables.root import RootOptions
from demo.data import DemoTenant
from research.imports import imported, main
from tests.builder.checkpoints import save_bert
from tests.builder.training.small_tenants import made
from tests.research.toys import toy_data
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentions

SIZES = {"train": 60, "dev": 20, "test": 30}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["toy-classify", "toy-near"])
def test_a_checkpoint_is_finetuned_imported_and_compared_once(tmp_path: Path, task: str) -> None:
    data, folder = toy_data(tmp_path, SIZES), tmp_path / "model"
    files = {part: made(tmp_path, "near", size, part) for part, size in SIZES.items()}
    near = DemoTenant("toy-near", "toys", "embed", "?", (), **files, majority_share=0)
    folder.mkdir()
    of_task = next(one for one in (*data.tenants, near) if one.id == task)
    options = RootOptions(0.1, name="imports", lower=2)
    given = str(save_bert(folder)), of_task, [data.domains[0].corpus], tmp_path / "work", options, Budget(minutes=0.01), DEVICE
    with by_one_step():
        found = imported(*given)
        (tenant,) = found.store.tenants()
        scores = found.report["test"]
        assert tenant.id == task and scores["tenant"]["rows"] == scores["checkpoint"]["rows"] == 30
        assert found.report["bytes"]["tenant"] < found.report["bytes"]["checkpoint"]
        written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()}
        assert imported(*given).report == found.report
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()} == written


def test_an_unknown_task_is_refused_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--task", "web-kinds", "--work", str(tmp_path / "work")]) == 1
    assert mentions(capsys.readouterr().err, "web-kinds", "web-kind", "stdlib-area") and not (tmp_path / "work").exists()
