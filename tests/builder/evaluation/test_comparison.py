"""How far baselines are from a tenant, and which of them a call trains."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from builder.console import progress_bar
from builder.evaluation.comparison import GROUPS, baselines, compared
from builder.evaluation.evaluation import Evaluation
from builder.store.store import TenantVersion
from builder.tasks.examples import Example
from builder.tasks.tasks import training_task
from tests.support.device import DEVICE

TENANT = TenantVersion("acme", 2, "root", 1, "classify", ["no", "yes"], 4)


def evaluation_of(right, file="test.jsonl"):
    """An evaluation of a tenant that answers these texts right."""
    examples = [Example(Path(file), i, f"text {i}", labels=("yes",)) for i in range(len(right))]
    answers = answers_of(right)
    scores = training_task("classify").score(TENANT.labels, examples, answers)
    return Evaluation(TENANT, SimpleNamespace(examples=examples), answers, scores)


def answers_of(right):
    return [["yes" if one else "no"] for one in right]


def test_a_difference_is_paired_by_text():
    """With a group for each text, its error is that of the mean difference of texts."""
    rng = np.random.default_rng(1)
    mine, other = rng.random((2, GROUPS)) < 0.7
    apart = other.astype(float) - mine
    found = compared(evaluation_of(mine), [answers_of(other)])
    assert (found.difference, found.off) == pytest.approx((apart.mean(), apart.std(ddof=1) / GROUPS**0.5))
    assert found.scores.main == pytest.approx(other.mean()) and found.described()["seeds"] == 1
    assert compared(evaluation_of(mine), [answers_of(mine)]).off == 0, "the same answers are surely no better"
    assert compared(evaluation_of([1]), [answers_of([0])]).described()["off"] is None


def test_several_seeds_count_with_their_mean_and_their_spread():
    mine, runs = np.ones(40), [np.arange(40) < share for share in (40, 30, 20)]
    found = compared(evaluation_of(mine), list(map(answers_of, runs)))
    assert (found.scores.main, found.difference, found.seeds) == (0.75, -0.25, 3)
    assert found.off > (0.25**2 / 3) ** 0.5  # that of the seeds alone


@pytest.mark.usefixtures("with_bars")
def test_what_is_trained_is_kept_and_trained_once(tmp_path, capsys):
    report, trained = {"asked": {"training": "abc"}, "seed": 5}, []
    store = SimpleNamespace(report=lambda tenant: report, tenant_folder=lambda name, version: tmp_path / name / str(version))

    def rival(given, evaluation, runs, *rest):
        assert given is store and rest == (DEVICE, None, None)
        for run in runs:
            if run[0] == "cut":
                raise KeyboardInterrupt
            with progress_bar(title="training", total=1):
                trained.append(run)
            yield answers_of([run[1] % 2] * 4)

    def call(names, file="test.jsonl", seeds=2):
        return dict(baselines(store, evaluation_of([1, 1, 0, 1], file), dict.fromkeys(names, rival), seeds, DEVICE, None, None))

    with pytest.raises(KeyboardInterrupt):
        call(["one", "cut"])
    assert trained == [("one", 5), ("one", 6)] and "one, seed 6: training" in capsys.readouterr().err
    assert call(["one"], "moved.jsonl")["one"].scores.main == 0.5 and len(trained) == 2
    found = call(["one", "two"], seeds=3)
    assert trained[2:] == [("one", 7), ("two", 5), ("two", 6), ("two", 7)] and found["two"].seeds == 3
    report["asked"] = {"training": "other data"}
    call(["one"])
    assert trained[6:] == [("one", 5), ("one", 6)]
    assert all("acme" in path.parts and "2" not in path.parts for path in tmp_path.rglob("*.json"))
