"""The loop: it ends by its limits, keeps the right weights, and stops at a loss that is no number."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from builder import console
from builder.learning.distil import WAY_OUT
from builder.learning.limits import Budget, Epochs
from builder.learning.loop import Diverged, ParameterGroup, Training, train
from builder.learning.progress import Exam, Progress
from builder.store import resumable
from tests.builder.training.small_tenants import made
from tests.cli.commands import refused, run
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentioning, mentions
from tests.support.wait import Clock


def training_of(module, score, loss_of=None, **options):
    """`score`: of a module after so many steps; its error is 0.1."""
    taken = [0]

    def learned(_):
        taken[0] += 1
        return module(torch.ones(1)).square().sum(), 1

    groups = [ParameterGroup(0.1, dict(module.named_parameters()))]
    return Training(
        "learning", DEVICE, groups, lambda first: iter(range(first, 1000)), loss_of or learned,
        lambda: Exam(score(taken[0]), 0.0, 0.1), WAY_OUT, **options,
    )  # fmt: skip


def learned(limit, score, **options):
    now = train(training_of(torch.nn.Linear(1, 1), score, **options), limit)
    return now.steps, [(exam["step"], exam["score"]) for exam in now.exams], now.exams[now.kept]["step"]


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_diverging_training_ends_at_once_and_is_not_saved(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(resumable, "SECONDS_BETWEEN", 0.0)
    module, seen, path = torch.nn.Linear(1, 1), [], tmp_path / "saved.pt"

    def loss_of(step):
        seen.append(step)
        loss = module(torch.ones(1)).square().sum()
        return (loss * math.nan if broken == "loss" else (loss - loss.detach()).abs().sqrt()) if step == 3 else loss, 1

    with pytest.raises(Diverged, match=mentioning("learning", 4, "--seed")):
        train(training_of(module, lambda _: 0.0, loss_of), Budget(steps=100), path)
    assert seen == [0, 1, 2, 3] and torch.load(path)["progress"]["steps"] == 3
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_another_program_is_told_once_a_second_what_is_done_and_each_exam(tmp_path, monkeypatch, with_bars):
    monkeypatch.setenv("HPLM_PROGRESS", str(file := tmp_path / "progress.jsonl"))
    monkeypatch.setattr(console, "time", clock := Clock(5.0))
    with console.progress_bar(title="looking up", total=9, unit="text") as bar:
        for _ in range(9):
            clock.seconds += 0.5
            bar.n += 1
            bar.refresh()
    told = [json.loads(line) for line in file.read_text().splitlines()]
    common = {"what": "looking up", "of": 9, "unit": "text", "says": None}
    assert told == [{**common, "done": done} for done in (0, 2, 4, 6, 8)]
    file.unlink()
    now = train(training_of(torch.nn.Linear(1, 1), lambda steps: steps / 10, exams=2), Budget(steps=30))
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one for one in told if "exam" in one] == [{"exam": number, **exam} for number, exam in enumerate(now.exams)]


def test_epochs_that_were_interrupted_learn_each_batch_once(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable, "SECONDS_BETWEEN", 0.0)
    epochs, path, module, seen, cut = Epochs([range(3), range(3, 6)], 3), tmp_path / "saved.pt", torch.nn.Linear(1, 1), [], [4]

    def loss_of(batch):
        if batch in cut:
            raise KeyboardInterrupt(cut.pop())
        seen.append(batch)
        return module(torch.ones(1)).square().sum(), 1

    training = replace(training_of(module, lambda _: 0.0, loss_of), batches=epochs.starting)
    with pytest.raises(KeyboardInterrupt):
        train(training, epochs, path)
    train(training, epochs, path)
    assert seen == [*range(6)]


@pytest.mark.slow
def test_a_tenant_that_diverges_gets_no_version_and_a_smaller_rate_gives_it_one(store, tmp_path, capsys):
    command = ["build", "tenant", "--store", store.folder, "--id", "acme", "--task", "classify", "--epochs", 1]
    command += ["--train", made(tmp_path, "classify", 40, 1), "--device", DEVICE]
    said = refused(capsys, *command, "--learning-rate", 1e30)
    assert mentions(said, "diverged", "nan", "--learning-rate") and not store.tenant_ids()
    with by_one_step():
        assert run(capsys, *command)["version"] == 1


def test_a_goal_ends_the_learning_as_soon_as_it_is_reached():
    """The second half of each round is examined."""
    steps, exams, kept = learned(Budget(steps=260, until=0.9999), lambda steps: steps / 1000)
    assert steps == kept == 260 and [step for step, _ in exams] == [0, 64, 80, 96, 112, 128, 224, 248, 260]
    assert learned(Budget(steps=260, until=0.2), lambda steps: steps / 1000) == (224, exams[:7], 224)
    assert learned(Budget(steps=260, until=0.05), lambda _: 0.05) == (0, [(0, 0.05)], 0)
    assert learned(Budget(minutes=1e-9), lambda _: 0.0)[0] <= 1
    assert learned(Budget(minutes=600, steps=4), lambda _: 0.0) == (4, [(0, 0.0), (4, 0.0)], 4)


def test_a_budget_is_examined_evenly_and_what_is_worse_than_the_start_is_dropped():
    module = torch.nn.Linear(1, 1)
    before = module.weight.item()
    now = train(training_of(module, lambda steps: -steps, exams=5), Budget(steps=20))
    assert [exam["step"] for exam in now.exams] == [0, 4, 8, 12, 16, 20] and (now.kept, module.weight.item()) == (0, before)
    assert now.reported()["kept_step"] == 0 and now.reported()["curve"][-1][0] == 20


def test_of_epochs_within_the_doubt_the_last_is_kept_and_patience_ends_them():
    scores = [0.0, 0.5, 0.8, 0.7, 0.55, 0.9, 0.9]
    epochs = [range(10)] * 6
    exams = [*zip(range(0, 50, 10), scores[:5], strict=True)]
    assert learned(Epochs(epochs, 2, 2.0), lambda steps: scores[steps // 10]) == (40, exams, 30)
    assert learned(Epochs(epochs, 2, 0.0), lambda steps: scores[steps // 10])[2] == 20
    assert learned(Epochs(epochs, 3, 0.0), lambda steps: scores[steps // 10])[2] == 60  # of equal ones, the last
    assert learned(Epochs(epochs, 2), lambda steps: -steps, start_counts=False) == (30, [(10, -10), (20, -20), (30, -30)], 10)


def test_a_rate_falls_to_zero_at_the_end_of_a_budget_and_of_each_round():
    goal, plain = Budget(steps=1000, until=0.9), Budget(steps=1000)
    rates = [goal.rate(Progress(steps)) for steps in range(1000)]
    assert rates[127] < 0.05 and rates[150] > 0.9 and rates[319] < 0.05
    assert all(rate <= plain.rate(Progress(steps)) + 1e-9 for steps, rate in enumerate(rates) if steps > 150)
    assert plain.rate(Progress(500)) == pytest.approx(0.5) and plain.rate(Progress(1000)) == 0
    both = Budget(minutes=1, steps=10)
    assert both.used(Progress(5, seconds=3.0)) == 0.5 and both.used(Progress(5, seconds=45.0)) == 0.75
    epochs = Epochs([range(50)] * 2, 3)
    assert epochs.rate(Progress(0)) < epochs.rate(Progress(10)) > epochs.rate(Progress(50)) > epochs.rate(Progress(99)) > 0


def test_the_exam_at_the_start_takes_nothing_of_the_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("builder.learning.loop.time", SimpleNamespace(monotonic=lambda: now[0]))

    def score(steps):
        now[0] += 100
        return steps

    assert learned(Budget(minutes=1, steps=3), score)[0] == 3
