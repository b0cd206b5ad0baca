"""The loop of an adaptation."""

import math
from functools import partial

import pytest
import torch
from tqdm import tqdm

from builder.adaptation import learning as adaptation
from builder.adaptation.goal import Goal
from builder.adaptation.learning import Budget, Course, Group, Learning
from builder.store.savepoint import Savepoint
from builder.training.model import Diverged
from hplm.errors import InvalidInput
from tests.support.message import mentioning, mentions


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_diverging_adaptation_ends_at_once_and_is_not_saved(broken, tmp_path, monkeypatch):
    monkeypatch.setattr("builder.store.savepoint.SECONDS_BETWEEN", 0.0)
    module, seen = torch.nn.Linear(1, 1), []

    def loss_of(step):
        seen.append(step)
        loss = module(torch.ones(1)).square().sum()
        return (loss * math.nan if broken == "loss" else (loss - loss.detach()).abs().sqrt()) if step == 3 else loss, 1

    path = tmp_path / "saved.pt"
    learning = Learning(module, [Group(0.1, dict(module.named_parameters()))], Budget(steps=100), Savepoint(path))
    with pytest.raises(Diverged, match=mentioning("head", 4, "--seed")):
        learning.run("fitting a head", lambda first: iter(range(first, 100)), loss_of, show_progress=False)
    assert seen == [0, 1, 2, 3] and torch.load(path)["course"]["steps"] == 3
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_bar_is_not_written_after_each_step(monkeypatch, capsys):
    monkeypatch.setattr(adaptation, "tqdm", partial(tqdm, mininterval=1e9))
    module = torch.nn.Linear(1, 1)
    learning = Learning(module, [Group(0.1, dict(module.named_parameters()))], Budget(steps=150), Savepoint(None))
    learning.run("adapting", lambda first: iter(range(first, 150)), lambda _: (module(torch.ones(1)).sum(), 1), True)
    said = capsys.readouterr().err
    assert said.count("step ") < 5 and "100%" in said and "step 150" in said


def aimed(budget, shares):
    """Learns towards a goal. `shares`: what is explained after a number of steps."""
    module = torch.nn.Linear(1, 1)
    learning = Learning(module, [Group(0.1, dict(module.named_parameters()))], budget, Savepoint(None))
    goal = Goal(budget, learning.course, lambda: [0.0, shares(learning.course.steps)], [0.0, shares(0)])
    if not goal.is_reached:
        learning.run(
            "adapting", lambda first: iter(range(first, 100)), lambda _: (module(torch.ones(1)).sum(), 1), False, goal.between
        )
    goal.report_missed(goal.exams[-1][-1])
    return learning.course.steps, goal.exams


def test_a_goal_ends_the_learning_as_soon_as_it_is_reached(monkeypatch, capsys):
    """The second half of each round is examined, and only the last share counts."""
    monkeypatch.setattr(adaptation, "FIRST_ROUND", 8)
    steps, exams = aimed(Budget(steps=60, until=0.9999), lambda steps: steps / 100)
    assert steps == 60 and mentions(capsys.readouterr().err, "0.9999", 60, "--minutes", "--steps")
    assert [number for number, *_ in exams][:9] == [0, 4, 5, 6, 7, 8, 14, 15, 16]
    assert exams == [[number, 0.0, number / 100] for number, *_ in exams]
    assert aimed(Budget(steps=60, until=0.145), lambda steps: steps / 100) == (15, exams[:8])
    assert aimed(Budget(steps=60, until=0.05), lambda steps: 0.05) == (0, [[0, 0.0, 0.05]])
    assert not capsys.readouterr().err
    assert aimed(Budget(minutes=1e-9), lambda steps: 0.0)[0] <= 1
    assert aimed(Budget(minutes=600, steps=4), lambda steps: 0.0)[0] == 4


def test_rounds_follow_each_other_and_grow(monkeypatch):
    monkeypatch.setattr(adaptation, "FIRST_ROUND", 10)
    assert [adaptation.round_of(steps) for steps in (0, 9, 10, 24, 25, 46)] == [
        (0, 10), (0, 10), (10, 15), (10, 15), (25, 22), (25, 22)
    ]  # fmt: skip
    goal, plain = Budget(steps=1000, until=0.9), Budget(steps=1000)
    rates = [goal.rate(steps, 0.0) for steps in range(1000)]
    assert rates[9] < 0.05 and rates[12] > 0.9 and rates[24] < 0.05  # it falls at the end of each round
    assert all(rate <= plain.rate(steps, 0.0) + 1e-9 for steps, rate in enumerate(rates) if steps > 150)
    assert plain.rate(500, 0.0) == pytest.approx(0.5) and plain.rate(1000, 0.0) == 0
    assert Budget(minutes=1, steps=10).used(5, 3.0) == 0.5 and Budget(minutes=1, steps=10).used(5, 45.0) == 0.75


def test_what_a_budget_amounts_to_is_said_after_the_first_steps(monkeypatch, capsys):
    monkeypatch.setattr(adaptation, "PACE_STEPS", 3)
    module, budget = torch.nn.Linear(1, 1), Budget(minutes=600, steps=5)
    learning = Learning(module, [Group(0.1, dict(module.named_parameters()))], budget, Savepoint(None))
    learning.run("adapting", lambda first: iter(range(first, 5)), lambda _: (module(torch.ones(1)).sum(), 1), True)
    assert mentions(capsys.readouterr().err, "steps a second", "5 steps", "10.0 hours")
    assert mentions(Budget(steps=4000).outlook(0.25), "0.25", "4,000", "4.4 hours")
    assert mentions(Budget(minutes=60).outlook(0.25), "60 minutes", 900)


def test_impossible_budgets_are_refused():
    assert Budget(steps=0).empty and not Budget(minutes=1).empty
    with pytest.raises(InvalidInput, match=r"(?=.*minutes)(?=.*steps)"):
        Budget()
    for minutes in (-1, math.inf, math.nan):
        with pytest.raises(InvalidInput):
            Budget(minutes=minutes)
    with pytest.raises(InvalidInput, match=mentioning("--until", 94)):
        Budget(minutes=1, until=94)


def test_a_long_curve_is_thinned():
    curve = Course(losses=[1.0] * 50 + [2.0] * 200).curve
    assert len(curve) == 100 and curve[0] == [3, 1.0] and curve[-1] == [250, 2.0]
    assert Course().curve == [] and Course(losses=[3.0]).curve == [[1, 3.0]]
