"""The loop of an adaptation: it ends by its budget or goal, at a loss that is no number, and goes on after an interruption."""

import math
import os

import pytest
import torch

from builder.adaptation import learning as adaptation
from builder.adaptation.distillation import adapt
from builder.adaptation.goal import Goal
from builder.adaptation.learning import Budget, Group, Learning
from builder.adaptation.masked import further_pretrain
from builder.store import savepoint
from builder.store.savepoint import Savepoint
from builder.training.model import Diverged
from hplm.errors import InvalidInput
from hplm.model.checkpoint import split
from tests.builder.adaptation.models import chained
from tests.builder.stores import CPU
from tests.support.message import mentioning, mentions


def learning_of(module, budget, saved=None):
    return Learning(module, [Group(0.1, dict(module.named_parameters()))], budget, Savepoint(saved))


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_diverging_adaptation_ends_at_once_and_is_not_saved(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(savepoint, "SECONDS_BETWEEN", 0.0)
    module, seen, path = torch.nn.Linear(1, 1), [], tmp_path / "saved.pt"

    def loss_of(step):
        seen.append(step)
        loss = module(torch.ones(1)).square().sum()
        return (loss * math.nan if broken == "loss" else (loss - loss.detach()).abs().sqrt()) if step == 3 else loss, 1

    with pytest.raises(Diverged, match=mentioning("head", 4, "--seed")):
        learning_of(module, Budget(steps=100), path).run(
            "fitting a head", lambda first: iter(range(first, 100)), loss_of, False
        )
    assert seen == [0, 1, 2, 3] and torch.load(path)["course"]["steps"] == 3
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def aimed(budget, shares):
    """Learns towards a goal. `shares`: what is explained after a number of steps."""
    module = torch.nn.Linear(1, 1)
    learning = learning_of(module, budget)
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


def test_a_rate_falls_to_zero_at_the_end_of_a_budget_and_of_each_round(monkeypatch):
    monkeypatch.setattr(adaptation, "FIRST_ROUND", 10)
    goal, plain = Budget(steps=1000, until=0.9), Budget(steps=1000)
    rates = [goal.rate(steps, 0.0) for steps in range(1000)]
    assert rates[9] < 0.05 and rates[12] > 0.9 and rates[24] < 0.05
    assert all(rate <= plain.rate(steps, 0.0) + 1e-9 for steps, rate in enumerate(rates) if steps > 150)
    assert plain.rate(500, 0.0) == pytest.approx(0.5) and plain.rate(1000, 0.0) == 0
    assert Budget(minutes=1, steps=10).used(5, 3.0) == 0.5 and Budget(minutes=1, steps=10).used(5, 45.0) == 0.75


def test_impossible_budgets_are_refused():
    with pytest.raises(InvalidInput, match=r"(?=.*minutes)(?=.*steps)"):
        Budget()
    for minutes in (-1, math.inf, math.nan):
        with pytest.raises(InvalidInput):
            Budget(minutes=minutes)
    with pytest.raises(InvalidInput, match=mentioning("--until", 94)):
        Budget(minutes=1, until=94)


def distilled(checkpoint, documents, budget, saved):
    lower, upper = split(checkpoint)
    report = adapt(checkpoint, lower, upper, documents, budget, 3, True, CPU, False, saved)
    return [lower, upper], (report.first_loss, report.at_start, report.at_end)


def guessed(checkpoint, documents, budget, saved):
    lower, upper = split(checkpoint)
    head, report = further_pretrain(checkpoint.config, lower, upper, None, "", documents, budget, 3, CPU, False, saved)
    return [lower, head], (report.first_loss, report.at_start, report.history)


@pytest.mark.parametrize("learn", [distilled, guessed])
def test_an_interrupted_adaptation_ends_with_the_same_weights(checkpoint, tmp_path, learn, monkeypatch):
    """It is interrupted twice, each time before a savepoint gets its name."""
    documents, budget = chained(checkpoint.config, 3000, 16, seed=1), Budget(steps=8)
    undisturbed, report = learn(checkpoint, documents, budget, None)
    saves, begun, replace, load = 0, [], os.replace, Savepoint.load

    def told(self):
        state = load(self)
        begun.append(state["course"]["steps"] if state is not None else 0)
        return state

    def dying(source, target):
        nonlocal saves
        saves += 1
        if saves in (2, 7):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(Savepoint, "load", told)
    monkeypatch.setattr(savepoint, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(os, "replace", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            learn(checkpoint, documents, budget, tmp_path / "saved.pt")
    found, again = learn(checkpoint, documents, budget, tmp_path / "saved.pt")
    assert max(begun) >= 2, "it must have continued"
    assert again == report
    for stack, other in zip(found, undisturbed, strict=True):
        assert all(torch.equal(part, other.state_dict()[name]) for name, part in stack.state_dict().items())
