"""The report on a toy: every number once, whatever is cut or moved; averages by hand; a table and a picture."""

import json
import random

import pytest

from builder.demo.data import DemoData, DemoDomain, DemoTenant
from builder.report import study as studies
from builder.report.results import Results
from builder.report.study import Study
from builder.report.table import averages_of, draw, markdown_of, scores_of
from builder.report.tiers import ALL, TIERS, Tier
from hplm.errors import InvalidInput
from tests.builder.adaptation.test_masked import CPU, save
from tests.builder.branches import some_lines
from tests.builder.test_tenant import classified, tagged, write

TINY = Tier(0.01, 0.01, "distil", train=30, dev=10, test=10, seeds=(0, 1), epochs=1)


@pytest.fixture
def data(tmp_path):
    rng = random.Random(0)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(some_lines(3000, seed=1)), "utf-8")
    tenants = []
    for task, maker in (("classify", classified), ("tag", tagged)):
        files = {
            part: write(tmp_path / f"{task}.{part}.jsonl", [maker(rng) for _ in range(count)])
            for part, count in TINY.sizes.items()
        }
        tenants.append(DemoTenant(f"toy-{task}", "toys", task, "?", (), **files, majority_share=0.5))
    return DemoData((DemoDomain("toys", ("toy",), corpus, 3000),), tuple(tenants))


def test_every_number_is_computed_once(data, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    model = str(save(tmp_path / "model", "with head"))
    trained, train = [], studies.train_scheme

    def counted(store, ground, name, *rest, **more):
        if len(trained) == 7:
            trained.append("cut")
            raise KeyboardInterrupt
        trained.append((ground.task, name))
        return train(store, ground, name, *rest, **more)

    monkeypatch.setattr(studies, "train_scheme", counted)
    study = Study(model, data, TINY, tmp_path / "work", Results(tmp_path / "results"), CPU)
    with pytest.raises(KeyboardInterrupt):
        study.run(show_progress=False)
    runs = study.run(show_progress=False)
    assert len(runs) == 2 * len(ALL) * 2 and len(trained) == len(runs) + 1
    assert {(run["task"], run["scheme"], run["seed"]) for run in runs} == {
        (task, scheme, seed) for task in ("toy-classify", "toy-tag") for scheme in ALL for seed in (0, 1)
    }
    elsewhere = Study(model, data, TINY, tmp_path / "elsewhere", Results(tmp_path / "results"), CPU)
    assert elsewhere.run(show_progress=False) == runs and len(trained) == len(runs) + 1
    assert not (tmp_path / "elsewhere").exists()
    data.tenants[0].train.write_text(data.tenants[1].train.read_text())  # other data are other numbers
    assert sum(elsewhere.results.get(run) is None for _, run in elsewhere._planned()) == 2 * len(ALL)


def made(task, scheme, seed, score):
    told = {"metric": "accuracy", "kind": "classify", "texts": 30}
    return {"task": task, "scheme": scheme, "seed": seed, "accuracy": score, **told}


RUNS = [
    made("a", "dedicated", 0, 0.8), made("a", "dedicated", 1, 0.9), made("a", "hplm", 0, 0.8), made("a", "hplm", 1, 0.8),
    made("b", "dedicated", 0, 0.5), made("b", "dedicated", 1, 0.5), made("b", "hplm", 0, 0.6), made("b", "hplm", 1, 0.4),
]  # fmt: skip


def test_averages_are_over_seeds_then_tasks(tmp_path):
    table = scores_of(RUNS)
    assert table["a"] == {"dedicated": pytest.approx(85), "hplm": pytest.approx(80)}
    assert averages_of(table) == {"dedicated": pytest.approx(67.5), "hplm": pytest.approx(65)}
    lines = markdown_of(RUNS).splitlines()
    assert lines[2] == "| a | classify | accuracy | 30 | 85.0 | 80.0 |" and lines[-1].endswith("| +0.00 | -2.50 |")
    draw(RUNS, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_does_not_fit_its_name_is_refused(tmp_path):
    results, run = Results(tmp_path), made("a", "hplm", 0, 1)
    results.put(run, {"accuracy": 1.0})
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({"run": {**run, "seed": 5}, "result": {}}))
    with pytest.raises(InvalidInput, match="is the result of another run than its name says"):
        results.get(run)
    assert results.get({**run, "seed": 1}) is None


def test_higher_tiers_compute_more():
    assert all(TIERS[n].train <= TIERS[n + 1].train and TIERS[n].epochs <= TIERS[n + 1].epochs for n in (1, 2))
