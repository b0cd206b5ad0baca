"""Plans as they are stored, and joined answers: Eq. 6 against values computed by hand."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.levels.ensemble import of_classes, of_ends, of_labels, of_numbers
from hplm.levels.plan import Plan, Step

PLAN = Plan((Step(0, cutoff=0.95, slope=4.0, alpha=0.7), Step(2, weight=0.6)), cost=0.8)


def test_a_plan_is_read_as_it_was_written():
    assert Plan.read(json.loads(json.dumps(asdict(PLAN)))) == PLAN


@pytest.mark.parametrize(
    "changed",
    [
        {"level": -1}, {"level": 2}, {"level": 3}, {"level": 0.0}, {"level": True}, {"cutoff": 1.1}, {"cutoff": "high"},
        {"slope": -1.0}, {"slope": float("inf")}, {"alpha": float("nan")}, {"weight": 0.5}, {"weight": True}, {"members": 3},
    ],
)  # fmt: skip
def test_a_step_that_makes_no_sense_is_refused(changed):
    with pytest.raises(TypeError):
        Plan.read({"steps": [{**asdict(PLAN.steps[0]), **changed}, asdict(PLAN.steps[1])]})


@pytest.mark.parametrize(
    "changed",
    [*({"cost": cost} for cost in (0, -1.0, "1", True, None, float("nan"), float("inf"))),
     *({"steps": steps} for steps in ([], [{"level": 0}], 3))],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(changed):
    with pytest.raises(TypeError):
        Plan.read({**asdict(PLAN), **changed})


HEADS = np.array([0])  # a passage of one window
BEFORE, NOW = np.log(np.array([[0.6, 0.3, 0.1]])), np.log(np.array([[0.2, 0.2, 0.6]]))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def of_all(before, now, weight):
    """Returns what every kind of answer makes of three rows with three columns."""
    kinds = [of_classes(before, now, weight), of_labels(before, now, weight), of_numbers(before, now, weight)]
    return [*kinds, of_ends(before, now, weight, HEADS)] if np.isscalar(weight) else kinds


def test_classes_have_the_weighted_mean_of_probabilities():
    joined = of_classes(BEFORE + 5, NOW - 2, 0.75)  # logits are log probabilities up to a constant
    assert np.exp(joined) == pytest.approx(np.array([[0.3, 0.225, 0.475]]))
    assert np.exp(of_classes(BEFORE, NOW, 0.0)) == pytest.approx(np.exp(BEFORE))


def test_every_text_may_have_a_weight_of_its_own():
    joined = of_classes(np.repeat(BEFORE, 3, 0), np.repeat(NOW + 1, 3, 0), np.array([0.75, 1.0, 0.0]))
    assert np.exp(joined[[0, 2]]) == pytest.approx(np.array([[0.3, 0.225, 0.475], [0.6, 0.3, 0.1]]))
    assert joined[1].tolist() == (NOW[0] + 1).tolist()


def test_labels_have_the_weighted_mean_each_for_itself():
    joined = of_labels(np.array([[0.0, -2.0]]), np.array([[np.log(4.0), 3.0]]), 0.5)
    assert sigmoid(joined) == pytest.approx(np.array([[(0.5 + 0.8) / 2, (sigmoid(-2) + sigmoid(3)) / 2]]))


def test_numbers_have_the_weighted_mean():
    assert of_numbers(np.array([[2.0]]), np.array([[6.0]]), 0.75).tolist() == [[5.0]]


def test_ends_are_choices_between_the_rows():
    before = np.log(np.array([[9.0, 9.0], [0.5, 0.2], [0.5, 0.8]]))
    now = np.log(np.array([[7.0, 7.0], [0.9, 0.4], [0.1, 0.6]]))
    joined = of_ends(before + np.array([3, -1]), now, 0.5, HEADS)
    assert np.exp(joined[1:]) == pytest.approx(np.array([[0.7, 0.3], [0.3, 0.7]]))
    assert joined[0].tolist() == [0, 0]  # a window's own row is no end


def test_no_answer_competes_with_both_ends():
    none = np.log(0.25)  # half of the score for each end: 0.5 beside tokens whose numbers add up to 0.5
    before = np.array([[0.0, 0.0, none], *np.log([[0.3, 0.1, 1], [0.2, 0.4, 1]])])
    now = np.array([[0.0, 0.0, 2 * np.log(0.2)], *np.log([[0.4, 0.6, 1], [0.4, 0.2, 1]])])
    joined = of_ends(before, now, 0.5, HEADS)
    assert np.exp(joined[1:, :2]) == pytest.approx(np.array([[0.35, 0.35], [0.3, 0.3]]))
    assert np.exp(joined[0, 2]) == pytest.approx(0.35 * 0.35)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 30, 1000]), st.floats(0, 1))
def test_joined_logits_are_finite_and_a_weight_of_one_changes_nothing(seed, scale, weight):
    before, now = (np.random.default_rng((seed, i)).normal(0, scale, (3, 3)).astype(np.float32) for i in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = of_all(before, now, weight)
    assert all(np.isfinite(one).all() and one.dtype == np.float32 for one in joined)
    for one in [*of_all(before, now, 1.0), *of_all(before, now, np.ones(3))]:
        assert np.array_equal(one, now)
