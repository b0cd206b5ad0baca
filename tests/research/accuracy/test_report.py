"""The report on a toy backbone: each number is computed once, averages equal those by hand, a table and a picture."""

from dataclasses import replace
from itertools import count, product
from typing import ClassVar

import pytest

from builder.store.store import Store
from research.accuracy.__main__ import main
from research.accuracy.report import AccuracyReport
from research.accuracy.studies import Tier
from research.accuracy.table import draw, markdown_of
from research.result_file import ResultFile
from tests.builder.checkpoints import save_bert
from tests.research.toys import toy_data
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentions

pytestmark = pytest.mark.slow

MINUTES = 0.005
TINY = Tier(30, 10, 10, (0, 1), 1, MINUTES, MINUTES, MINUTES, MINUTES, tenants=(3,), tenant_texts=8)
LAYERS = 4
FEW = ("toy-classify", "toy-tag")
SCHEMES = ["dedicated", "plot", "hplm", "adapter", "shared"]


@pytest.fixture(scope="module", autouse=True)
def one_step():
    """The tests in `tests/research/schemes` say what each scheme learns."""
    with by_one_step():
        yield


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """Gives a report on two tasks of toy words. Its stores are built once for all studies."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "model").mkdir()
    model, data = str(save_bert(folder / "model", with_head=True)), toy_data(folder, TINY.sizes, 3000)
    return AccuracyReport("toy", model, LAYERS, data, TINY, folder / "work", ResultFile(folder / "none"), DEVICE, FEW)


@pytest.fixture
def report(made_once, tmp_path):
    return replace(made_once, results=ResultFile(tmp_path / "results.jsonl"))


class Interrupted(ResultFile):
    """Is interrupted behind the seventh number."""

    put_before: ClassVar = count(1)

    def put(self, run, result):
        super().put(run, result)
        if next(self.put_before) == 7:
            raise KeyboardInterrupt


def test_every_number_is_computed_once(report, tmp_path):
    first, second = report.data.tenants
    report = replace(report, data=replace(report.data, tenants=(first,)))
    schemes, watched = report.studies["schemes"], replace(report, results=Interrupted(report.results.path))
    with pytest.raises(KeyboardInterrupt):
        watched.run([schemes], at_a_time=1)
    assert sorted(run["seed"] for run in report.finished(schemes)) == [0] * 5 + [1] * 2
    watched.run([schemes], at_a_time=1)
    runs = report.finished(schemes)
    assert len(runs) == report.size(schemes) == 5 * 2 == next(Interrupted.put_before) - 1
    assert {(run["task"], run["case"], run["seed"]) for run in runs} == set(product(FEW[:1], SCHEMES, (0, 1)))
    assert all(("windows_found" in run) == (run["case"] in ("plot", "hplm")) for run in runs)
    replace(report, work=tmp_path / "elsewhere").run([schemes], at_a_time=1)  # nothing is missing
    assert not (tmp_path / "elsewhere").exists()
    other = replace(report.data, tenants=(replace(first, train=second.train),))
    assert not replace(report, data=other).finished(schemes)  # other data give other numbers
    other = replace(report.data, domains=(replace(report.data.domains[0], corpus=first.train),))
    assert {run["case"] for run in replace(report, data=other).finished(schemes)} == {"dedicated", "adapter", "shared"}
    assert replace(report, data=other).home != report.home  # and stores of the old corpus are not continued


@pytest.mark.parametrize("name", ["keep", "o1", "tenants-3", "teachers"])
def test_studies_cut_tables_pretrain_resample_and_teach(report, name):
    """Each case of these studies has another recipe, scheme or sample, so no two of its results are stored under one run."""
    report = replace(report, tier=replace(TINY, seeds=(0,)), few=FEW[:1])
    study = report.studies[name]
    report.run([study], at_a_time=1)
    runs = {run["case"]: run for run in report.finished(study)}
    assert len(report.finished(study)) == report.size(study) == len(list(report.results))
    recipes = [case.recipe for case in study.cases if case.recipe is not None]
    sizes = [Store(report.home / "stores" / one.store).table(one.branch("toys"), 1).meta.keys for one in recipes]
    assert sizes == sorted(sizes, reverse=True)  # the largest table first
    assert name != "keep" or sizes[0] > sizes[-1]
    if name == "teachers":
        assert [case for case, run in runs.items() if "teacher" in run] == ["hplm, taught"]
        usual = TINY.training("hplm", LAYERS, 3, 0).epochs
        passes = {one.run["training"]["epochs"] for one in report.results if one.run["scheme"] == "hplm"}
        assert passes == {usual, round(usual * (LAYERS + 3) / 3)}  # one of the four layers is a lower one


TOLD = {"metric": "accuracy", "kind": "classify", "trained_on": 30}
SCORES = {"a": {"dedicated": (0.8, 0.9), "hplm": (0.8, 0.8)}, "b": {"dedicated": (0.5, 0.5), "hplm": (0.6, 0.4, 1)}}


def test_averages_are_over_the_seeds_of_all_cases_then_over_tasks(tmp_path):
    runs = [
        {"task": task, "case": case, "seed": seed, "accuracy": score, **TOLD}
        for task, cases in SCORES.items()
        for case, scores in cases.items()
        for seed, score in enumerate(scores)
    ]
    first, *_, gaps = markdown_of(runs).splitlines()[2:]
    assert first == "| a | classify | accuracy | 30 | 2 | 85.0 | 80.0 |" and gaps.endswith("|  | -2.50 ± 2.50 |")
    draw([runs[0], runs[3]], "no seed in common", tmp_path / "report.png")
    draw(runs, "schemes", tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_model_is_named(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "typo"), "--work", str(tmp_path / "work")]) == 1
    assert mentions(capsys.readouterr().err, tmp_path / "typo", "there is no such folder")
    assert main(["--at-once", "0"]) == 1 and mentions(capsys.readouterr().err, "--at-once", 0)
    assert not (tmp_path / "work").exists()
