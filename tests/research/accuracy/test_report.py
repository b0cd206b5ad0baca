"""The report on a toy backbone: each number is computed once, averages equal those by hand, a table and a picture."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from builder.store.store import Store
from demo.__main__ import named
from demo.data import DemoData, DemoDomain, DemoTenant
from hplm.errors import InvalidInput
from research.accuracy import report as reports
from research.accuracy.__main__ import main
from research.accuracy.recipes import DomainRecipe, Pretraining, RootRecipe
from research.accuracy.report import Report
from research.accuracy.studies import studies_of, tenants_of
from research.accuracy.table import averages_of, draw, markdown_of, scores_of, tenants_in
from research.accuracy.tiers import TIERS, Tier, passes
from research.result_file import ResultFile
from tests.builder.adaptation.test_masked import CPU, save
from tests.builder.tables.branches import some_lines
from tests.builder.training.small_tenants import classified, tagged, write
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

MINUTES = 0.005
TINY = Tier(30, 10, 10, (0, 1), 1, MINUTES, MINUTES, "distil", MINUTES, MINUTES, tenants=(3,), tenant_texts=8)
LAYERS = 4
FEW = ("toy-classify", "toy-tag")
SCHEMES = ["dedicated", "plot", "hplm", "adapter", "shared"]


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


@pytest.fixture
def report(data, tmp_path):
    (tmp_path / "model").mkdir()
    model = str(save(tmp_path / "model", "with head"))
    return Report("toy", model, LAYERS, data, TINY, tmp_path / "work", ResultFile(tmp_path / "results.jsonl"), CPU, FEW)


def test_every_number_is_computed_once(report, tmp_path, monkeypatch):
    trained, train = [], reports.train_scheme

    def counted(store, ground, name, *rest, **more):
        if len(trained) == 7:
            trained.append("cut")
            raise KeyboardInterrupt
        trained.append((ground.task, name))
        return train(store, ground, name, *rest, **more)

    monkeypatch.setattr(reports, "train_scheme", counted)
    schemes = report.studies["schemes"]
    with pytest.raises(KeyboardInterrupt):
        report.run([schemes], at_a_time=1)
    assert len(report.finished(schemes)) == 7 and {run["seed"] for run in report.finished(schemes)[:5]} == {0}
    report.run([schemes], at_a_time=1)
    runs = report.finished(schemes)
    assert len(runs) == report.size(schemes) == 2 * 5 * 2 and len(trained) == len(runs) + 1
    assert {(run["task"], run["case"], run["seed"]) for run in runs} == {
        (task, case, seed) for task in FEW for case in SCHEMES for seed in (0, 1)
    }
    assert all(("windows_found" in run) == (run["case"] in ("plot", "hplm")) for run in runs)
    elsewhere = replace(report, work=tmp_path / "elsewhere")
    elsewhere.run([schemes], at_a_time=1)
    assert elsewhere.finished(schemes) == runs and len(trained) == len(runs) + 1
    assert not (tmp_path / "elsewhere").exists()
    tasks = report.data.tenants
    tasks[0].train.write_text(tasks[1].train.read_text())  # other data give other numbers
    assert len(replace(report).finished(schemes)) == 5 * 2
    report.data.domains[0].corpus.write_text("another")  # a BERT without tables does not read the corpus
    assert {run["case"] for run in replace(report).finished(schemes)} == {"dedicated", "adapter", "shared"}
    assert replace(report).home != report.home  # and stores of the old corpus are not continued


def test_an_interrupted_store_continues_after_the_data_were_moved(report, tmp_path, monkeypatch):
    """The data are written again, into another folder, when a package is installed."""
    report = replace(report, tier=replace(TINY, seeds=(0,)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("builder.tables.root.build_table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        report.run([report.studies["schemes"]], at_a_time=1)
    moved = tuple(
        replace(domain, corpus=Path(shutil.copy(domain.corpus, tmp_path / f"moved-{domain.name}.txt")))
        for domain in report.data.domains
    )
    again = replace(report, data=replace(report.data, domains=moved))
    assert again.home == report.home
    again.run([again.studies["schemes"]], at_a_time=1)
    assert len(again.finished(again.studies["schemes"])) == again.size(again.studies["schemes"])


def test_all_studies_run_in_parallel(report):
    """Runs all studies in processes of their own, with all kinds of stores, tables and whole BERTs."""
    report = replace(report, tier=replace(TINY, seeds=(0,)))
    report.run(list(report.studies.values()), at_a_time=2)
    for study in report.studies.values():
        runs = report.finished(study)
        assert len(runs) == report.size(study) > 0
        assert all(0 <= run[run["metric"]] <= 1 for run in runs)
        markdown_of(runs)
    stores = {folder.name for folder in (report.home / "stores").iterdir()}
    shapes = ("1-3-3", "1-3-2", "1-3-5", "2-2-3", "1-2-3")
    cuts = (f"1-3-3-0.005-0.3-cut-{share:g}" for share in (0.1, 0.04, 0.004))
    assert stores == {"1-3-3-0-0.001", "1-3-3-0.01-0.3", *(f"{shape}-0.005-0.3" for shape in shapes), *cuts}
    pretrained = {folder.name for folder in (report.home / "pretrained").iterdir()}
    assert pretrained == {f"toys-{part}-3-0.005" for part in ("lower", "upper", "all")}
    found = {run["case"]: run["windows_found"][0] for run in report.finished(report.studies["keep"])}
    assert found["100.0%"] > found["10.0%"] > found["4.0%"] > 0
    whole, cut = (Store(report.home / "stores" / name) for name in ("1-3-3-0.005-0.3", "1-3-3-0.005-0.3-cut-0.1"))
    assert cut.table("root", 1).meta.keys < whole.table("root", 1).meta.keys
    for lower in ("root-1", "toys.distil-0.005.0.1-fp16-1"):
        assert (cut.folder / "lower" / f"{lower}.safetensors").exists()
    assert (cut.folder / "upper.safetensors").read_bytes() == (whole.folder / "upper.safetensors").read_bytes()
    assert {run["trained_on"] for run in report.finished(report.studies["tenants-3"])} == {8}


def test_studies_share_equal_runs():
    studies = studies_of(TIERS[1], 6)
    below = next(case.below for case in studies["schemes"].cases if case.label == "hplm")
    assert (below.root.lower, below.root.upper, below.keep, below.dtype) == (2, 4, 1.0, "fp16")
    adapted = [(case.scheme, case.below.root.minutes) for case in studies["root"].cases]
    assert adapted == [("plot", 30), ("plot", 60), ("hplm", 30), ("hplm", 60)]
    assert [case.below == below for case in studies["root"].cases] == [True, False, True, False]
    for name in ("pretraining", "keep", "stored"):
        assert any(case.below == below and case.scheme == "hplm" for case in studies[name].cases)
        assert all(case.below.root.whole == below.root for case in studies[name].cases)
    shares = [(case.below.keep, case.below.root.share) for case in studies["keep"].cases]
    assert shares == [(1.0, 0.3), (0.4, 0.3), (0.1, 0.1), (0.04, 0.04), (0.004, 0.004)]
    lower = [case.below.root for case in studies["lower"].cases]
    assert [(root.lower, root.upper) for root in lower] == [(1, 3), (2, 3), (3, 3)]
    assert [case.label for case in studies["split"].cases] == ["1 + 5", "2 + 4", "3 + 3"]
    assert [case.below.root.upper for case in studies_of(TIERS[1], 12)["upper"].cases] == [4, 6, 8]
    assert [case.below for case in studies["o1"].cases] == [None, *(Pretraining(part, 4) for part in ("lower", "upper", "all"))]


def test_tenants_are_spread_in_proportion_to_texts(data):
    first, second = data.tenants
    assert tenants_of([(first, 3000), (second, 1000)], 100) == [(first, 75), (second, 25)]
    assert tenants_of([(first, 3000), (second, 1000)], 10) == [(first, 8), (second, 2)]
    assert tenants_of([(first, 3000), (second, 10)], 2) == [(first, 1), (second, 1)]


def made(task, case, seed, score):
    told = {"metric": "accuracy", "kind": "classify", "trained_on": 30}
    return {"task": task, "case": case, "seed": seed, "accuracy": score, **told}


RUNS = [
    made("a", "dedicated", 0, 0.8), made("a", "dedicated", 1, 0.9), made("a", "hplm", 0, 0.8), made("a", "hplm", 1, 0.8),
    made("b", "dedicated", 0, 0.5), made("b", "dedicated", 1, 0.5), made("b", "hplm", 0, 0.6), made("b", "hplm", 1, 0.4),
]  # fmt: skip


def test_averages_are_over_seeds_then_tasks(tmp_path):
    table = scores_of(RUNS)
    assert table["a"] == {"dedicated": pytest.approx(85), "hplm": pytest.approx(80)}
    assert averages_of(table) == {"dedicated": pytest.approx(67.5), "hplm": pytest.approx(65)}
    lines = markdown_of(RUNS).splitlines()
    assert lines[2] == "| a | classify | accuracy | 30 | 2 | 85.0 | 80.0 |" and lines[-1].endswith("| +0.00 | -2.50 |")
    draw([RUNS[0], RUNS[3]], "no seed in common", tmp_path / "report.png")
    draw(RUNS, "schemes", tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_if_runs_are_tenants_tasks_are_weighted_by_their_tenants(tmp_path):
    runs = [*RUNS, *(made("b", case, seed, 0.5) for case in ("dedicated", "hplm") for seed in (2, 3))]
    weights = tenants_in(runs)
    assert weights == {"a": 2, "b": 4}
    assert averages_of(scores_of(runs), weights) == {"dedicated": pytest.approx(185 / 3), "hplm": pytest.approx(60)}
    assert "**61.67** | **60.00**" in markdown_of(runs, weights)


def test_another_model_of_the_same_name_has_other_results(tmp_path):
    for number in (1, 2):
        folder = tmp_path / str(number) / "best"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"number": {number}}}')
    names = {named(str(tmp_path / str(number) / "best")) for number in (1, 2)}
    assert len(names) == 2 and all(name.startswith("best-") for name in names)
    assert named("somebody/bert") == "somebody/bert"


def notes_of(named, runs):
    """Returns how many sentences below the table name all of these."""
    lines = markdown_of(runs).splitlines()
    return sum(mentions(line, *named) for line in lines if line and not line.startswith("|"))


def test_notes_name_different_roots_and_ways_of_training():
    way = {"products": "bfloat16", "device": "cpu"}
    one, other = ({**run, "root": root, **way} for run, root in zip(RUNS[2:4], "ab", strict=True))
    assert notes_of(["hplm", "a", "b"], [*RUNS[:2], one, other]) == 1
    untold = {name: value for name, value in other.items() if name not in ("root", "products")}
    assert notes_of(["hplm", "a"], [one, untold]) == 1
    assert notes_of(["bfloat16", "cpu"], [one, untold]) == 1
    assert notes_of(["bfloat16", "cpu", "float32", "cuda"], [{**RUNS[0], "products": "float32", "device": "cuda"}, one]) == 1
    assert notes_of([], [one, {**one, "task": "b"}]) == notes_of([], [one, one]) == 0


def test_options_without_effect_do_not_change_the_run():
    studies = studies_of(TIERS[1], 6)
    below = studies["schemes"].cases[1].below
    assert replace(below, learn="distil").plain == below.plain == below
    assert replace(below, minutes=4, learn="distil").plain != below.plain
    bare = replace(below, keep=0.0)
    assert replace(bare, minutes=9, learn="distil", dtype="int8").plain == bare.plain


def test_unfinished_cells_stay_empty():
    lines = markdown_of(RUNS[:-2]).splitlines()
    assert lines[3] == "| b | classify | accuracy | 30 | 2 | 50.0 |  |"
    assert lines[4] == "| **average** |  |  |  |  | **67.50** |  |"


def test_other_seeds_are_not_compared():
    lines = markdown_of(RUNS[:-1]).splitlines()
    assert lines[2] == "| a | classify | accuracy | 30 | 2 | 85.0 | 80.0 |"
    assert lines[3] == "| b | classify | accuracy | 30 | 1 | 50.0 | 60.0 |"
    assert markdown_of([RUNS[0], RUNS[3]]).splitlines()[2] == "| a | classify | accuracy | 30 | 0 |  |  |"


def test_a_missing_model_is_named(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "typo"), "--work", str(tmp_path / "work")]) == 1
    assert mentions(capsys.readouterr().err, f"--model {tmp_path / 'typo'}")
    assert not (tmp_path / "work").exists()


def test_a_whole_bert_needs_no_adapted_root(report):
    """Adapters beside it are on as many upper layers as an hPLM has, and the run names that number."""
    report = replace(report, tier=replace(TINY, seeds=(0,)))
    whole = [case for case in report.studies["schemes"].cases if case.below is None]
    report.run([replace(report.studies["schemes"], cases=tuple(whole))], at_a_time=1)
    assert [folder.name for folder in (report.home / "stores").iterdir()] == ["1-3-3-0-0.001"]
    told = {told["scheme"]: told for told, _ in report.results}
    assert {scheme: told[scheme].get("upper") for scheme in told} == {"dedicated": None, "adapter": 3, "shared": None}


def test_no_scheme_costs_more_than_a_dedicated_bert():
    assert [passes(scheme, 6, 4) for scheme in SCHEMES] == [3, 4, 4, 3, 9]
    assert [passes(scheme, 6, 3) for scheme in SCHEMES] == [3, 4, 4, 4, 9]
    assert [passes(scheme, 6, 5) for scheme in SCHEMES] == [3, 3, 3, 3, 9]
    assert passes("dedicated-upper", 6, 4) == passes("dedicated-lower", 6, 3) == 3


def test_higher_tiers_compute_more():
    assert all(TIERS[n].train <= TIERS[n + 1].train and TIERS[n].times <= TIERS[n + 1].times for n in (1, 2))
    options = TIERS[2].training("hplm", 6, 4, seed=4)
    assert options.epochs == TIERS[2].times * passes("hplm", 6, 4) and options.seed == 4
    with pytest.raises(InvalidInput, match=mentioning("--seeds", "'one'")):
        TIERS[1].with_seeds("one")
    assert TIERS[1].with_seeds("0,2").seeds == (0, 2)


def test_numbers_on_all_n_grams_do_not_depend_on_how_n_grams_are_ranked():
    below = DomainRecipe(RootRecipe(minutes=1, keep=1.0, lower=1, upper=1), minutes=0, learn="masked")
    assert not below.lacks_ngrams
    for cut in (replace(below, keep=0.5), replace(below, keep=0.0), replace(below, root=replace(below.root, keep=0.3))):
        assert cut.lacks_ngrams
    assert replace(below, root=below.root.cut_to(0.1)).lacks_ngrams
