"""Thresholds that are chosen by made-up answers, and heads that learn what is easy to learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from builder.exits.heads import learned, outputs_of
from builder.exits.states import States
from builder.exits.thresholds import Answered, Estimate, Leaving, chosen
from builder.tasks.tasks import training_task
from builder.training.model import Diverged
from hplm.adapters.layout import exit_layout
from testing.toy import CONFIG
from tests.support.learning import by_one_step

TEXTS = 2000
COSTS = np.array([0.0, 0.4, 1.0])


def made_up(useful=(True, True), look=0.01, seed=0):
    """Two exits. The surer a useful one is, the likelier it is right; one that is not useful is as often wrong when sure."""
    rng = np.random.default_rng(seed)
    sure = rng.uniform(0.5, 1, (2, TEXTS))
    right = rng.uniform(size=(2, TEXTS)) < np.where(np.array(useful)[:, None], sure, 0.5)
    agrees = np.vstack([right, np.ones(TEXTS, bool)])
    return Answered(sure, agrees, 1.0 - agrees, COSTS, look, np.ones(TEXTS))


def test_the_allowed_loss_is_kept_on_further_texts_and_spares_work():
    (found,) = chosen(made_up(), [2.0])
    further = [made_up(seed=seed) for seed in range(1, 6)]
    lost = [100 * texts.losses_of(texts.left_at(found.plan)).mean() for texts in further]
    assert 0.6 < np.mean(lost) < 2.5
    assert found.plan.cost < 0.98


@pytest.mark.parametrize("useful", [(False, True), (True, False)])
def test_texts_leave_where_it_pays(useful):
    (found,) = chosen(made_up(useful), [1.0])
    assert found.plan.exit == useful.index(True) and found.plan.leaves > 0.02
    (dear,) = chosen(made_up(look=2.0), [1.0])  # looking costs more than all layers
    assert dear.plan.exit is None and dear.plan.cost == 1 and dear.loss.points == 0
    costs = [found.plan.cost for found in chosen(made_up(), (0.0, 1.0, 5.0, 20.0, 100.0))]
    assert costs == sorted(costs, reverse=True) and costs[-1] < 0.05


def test_a_text_leaves_that_is_sure_enough():
    answered = Answered(
        np.array([[0.9, 0.5, 0.5], [0.9, 0.9, 0.5]]), np.array([[0, 1, 1], [1, 1, 1], [1, 1, 1]], bool),
        np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 0]]), COSTS, 0.01, np.ones(3),
    )  # fmt: skip
    assert answered.left_at(Leaving(0, 0.8)).tolist() == [0, 2, 2]
    assert answered.left_at(Leaving(None)).tolist() == [2, 2, 2]
    first, second = answered.plan(Leaving(0, 0.8)), answered.plan(Leaving(1, 0.8))
    assert (first.leaves, first.agrees) == (pytest.approx(1 / 3, abs=1e-4), 0.0)
    assert (second.leaves, second.agrees) == (pytest.approx(2 / 3, abs=1e-4), 1.0)
    assert second.cost == pytest.approx((0.4 + 0.4 + 1.0) / 3 + 0.01, abs=1e-4)
    assert chosen(answered, [0.0])[0].plan.exit == 1


def test_halves_judge_each_other():
    """Where confidence says nothing, small samples find lucky thresholds. What is printed is what further texts lose."""
    rng, own, found, further = np.random.default_rng(0), [], [], []

    def answered(texts):
        agrees = np.vstack([rng.uniform(size=(2, texts)) < 0.97, np.ones(texts, bool)])
        return Answered(rng.uniform(0.5, 1, (2, texts)), agrees, 1.0 - agrees, COSTS, 0.01, np.ones(texts))

    for _ in range(24):
        some, others = answered(200), answered(5000)
        (plan,) = chosen(some, [1.0])
        assert plan.agrees == pytest.approx(1 - plan.loss.points / 100, abs=1e-3)
        found.append(plan.loss.points)
        for losses, texts in ((own, some), (further, others)):
            losses.append(100 * texts.losses_of(texts.left_at(plan.plan)).mean())
    assert np.mean(own) < 0.8, "the standard error of the loss is not counted"
    assert 1.0 < np.mean(further) < np.mean(found) + 0.1


def test_an_interval_is_that_of_1_96_standard_errors():
    assert Estimate.of(np.array([0.0, 1.0, 0.0, 1.0])) == (50.0, round(100 * 1.96 * (1 / 3) ** 0.5 / 2, 2))
    assert Estimate.of(np.array([0.5])) == (50.0, 0.0)


def states(answer, seed=0):
    """Rows that show one number of each text, with noise. `answer` makes logits of these numbers. Also returns the numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(600, 1, generator=generator)
    rows = 3 + 2 * numbers + torch.randn(600, 2 * CONFIG.hidden, generator=generator)
    spans = [np.zeros((1, 2), np.int32)] * 600
    return States([rows.half()], answer(numbers), [1] * 600, spans, np.full(600, 9)), numbers


def test_heads_learn_the_answers_of_rows_and_are_rounded_as_they_are_stored():
    layout, task = exit_layout(CONFIG, 2), training_task("classify")
    own, _ = states(lambda numbers: 4 * torch.cat([numbers, -numbers], dim=1))
    others, numbers = states(lambda numbers: numbers, seed=1)
    (head,) = learned(own, layout, task)
    assert {name: weight.shape for name, weight in head.items()} == layout.shapes
    assert all(weight.dtype == torch.float16 for weight in head.values())
    right = outputs_of(head, layout, others.exits[0]).argmax(dim=1) == (numbers[:, 0] < 0).long()
    assert right.float().mean() > 0.85


def test_heads_of_numbers_answer_on_their_scale_and_say_how_far_off_they_are():
    layout = exit_layout(CONFIG, 2)
    (head,) = learned(states(lambda numbers: 1000 + 50 * numbers)[0], layout, training_task("regress"))
    others, numbers = states(lambda numbers: 1000 + 50 * numbers, seed=1)
    outputs = outputs_of(head, layout, others.exits[0])
    error = float((outputs[:, 0] - others.logits[:, 0]).abs().mean())
    assert error < 0.5 * 50 * float(numbers.abs().mean())
    assert 0.5 < math.exp(outputs[:, 1].mean()) / error < 4  # calibrated on further texts


def test_weights_that_do_not_fit_are_an_error():
    with pytest.raises(Diverged, match="16 bits"), by_one_step():
        learned(states(lambda numbers: 1e7 * numbers)[0], exit_layout(CONFIG, 2), training_task("regress"))
