"""Plans and simpler ways take made-up answers of levels; differences have errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from builder.cascade.candidates import candidates, tried
from builder.cascade.report.answers import Answers, pair_of, with_alpha, with_cutoff, without_ensemble
from builder.cascade.report.outcomes import (
    GROUPS,
    Outcome,
    error_of,
    left_out,
    points_between,
    points_lost,
    ratio_between,
    values_of,
)
from builder.cascade.report.ways import CASCADE, INFAAS, ORACLE, RANDOM, STRONG, ways_of
from hplm.levels.plan import Plan, Step
from tests.builder.cascade.measured import measured

PLAN = Plan((Step(0, 0.7, 16.0, 0.6), Step(2, weight=0.6)))


def answers(**options):
    return Answers(measured(**options))


@pytest.mark.parametrize("levels", [(2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("in_one", [True, False])
def test_a_plan_does_what_its_profile_says(levels, in_one):
    made = measured()
    if not in_one:
        made = replace(made, in_one=np.arange(len(made.examples)) % 7 != 0)
    wanted = tried(made, levels, 0.7, 16.0, 0.6 if len(levels) > 1 else 0.0)
    own = Answers(made)
    found = own.outcome(own.through(wanted.plan))
    assert found.score == pytest.approx(wanted.score)
    assert float(found.seconds.mean()) == pytest.approx(wanted.mean)
    assert (found.unread / found.words if found.words else 0) == pytest.approx(wanted.pruned)
    if in_one:
        assert found.went_on == pytest.approx(wanted.reached[1:])


def test_work_counts_tokens_times_layers():
    own = answers()
    assert own.outcome(own.alone(0)).work == pytest.approx(0.25)
    every = own.outcome(own.through(without_ensemble(with_alpha(with_cutoff(PLAN, 1.0), 0.0))))
    assert every.work == pytest.approx(1.25) and every.went_on == (1.0,) and not every.unread
    assert every.score == own.measured.scores[2]
    assert own.outcome(own.by_vote([1, 1, 1])).work == pytest.approx(1.75)


def test_ways_are_ordered_as_their_knowledge_is():
    own = answers(texts=2000)
    scores = own.measured.scores
    ways = ways_of(own, PLAN, scores, 100.0)
    assert ways[STRONG].score == scores[2] and ways[INFAAS].score == scores[0]  # a drop of 100 points allows every level
    assert ways_of(own, PLAN, scores, 0.0)[INFAAS].score == scores[2]
    assert ways[ORACLE].score > ways[CASCADE].score > ways[RANDOM].score
    assert ways[RANDOM].went_on == ways[CASCADE].went_on
    assert ways[ORACLE].score == np.mean((own.hits[0] + own.hits[2]) > 0)


def test_a_vote_counts_levels_by_their_weights():
    own = answers()
    alone = [own.outcome(own.alone(level)).score for level in range(3)]
    assert own.outcome(own.by_vote([1, 0, 0])).score == alone[0]
    assert own.outcome(own.by_vote([1, 1, 3])).score == alone[2]
    majority = sum(hits for hits in own.hits) >= 2
    assert own.outcome(own.by_vote([1, 1, 1])).score >= majority.mean()


def test_tasks_without_one_label_a_row_vote_by_their_mean():
    made = measured()
    number = replace(made, task=replace(made.task, one_label_a_row=False))
    own = Answers(number)
    assert own.by_vote([0, 0, 1]).answers == made.answers[2] and own.by_vote([1, 0, 0]).answers == made.answers[0]


def test_by_rank_the_least_sure_go_on():
    own = answers()
    passed, plain = own.by_rank(PLAN), own.through(PLAN)
    (going,) = passed.going
    sure = own.measured.confidences[0]
    assert len(going) == len(plain.going[0])
    assert sure[going].max() <= np.delete(sure, going).min()


def test_the_cheapest_hard_cut_loses_no_more_than_it_may():
    own = answers(texts=1000)
    cutoff = own.cheapest_hard_cut(0, 2, 8.0)
    assert own.outcome(own.by_hard_cut(0, 2, cutoff)).score >= own.measured.scores[2] - 0.08
    cheaper = own.outcome(own.by_hard_cut(0, 2, round(cutoff - 0.05, 2)))
    assert cheaper.score < own.measured.scores[2] - 0.08
    assert own.cheapest_hard_cut(0, 2, -100.0) is None


def test_calibration_errors_are_those_of_the_right_confidence():
    errors = answers(texts=4000).errors()
    assert errors.shape == (2, 4)
    before, after, *debiased = errors.sum(axis=0)
    assert after < before and debiased[1] < debiased[0]  # the logits were doubled


def test_a_plan_of_one_level_is_examined_between_all_levels():
    assert pair_of(Plan((Step(1),)), 2) == (0, 2)
    assert pair_of(Plan((Step(0, 0.5), Step(1))), 2) == (0, 1)


def outcome(right):
    right = np.array(right, dtype=float)
    return Outcome(float(right.mean()), right, np.ones(len(right)), np.ones(len(right)))


def test_lost_points_are_paired():
    """Two tenants: the second text is lost by one of them. The error is that of the mean over four texts."""
    strong = {"a": [outcome([1, 1, 0, 0]), outcome([1, 1, 0, 0])]}
    other = {"a": [outcome([1, 1, 0, 0]), outcome([1, 0, 0, 0])]}
    points, error = points_lost(strong, other)
    assert points == 12.5
    assert error == pytest.approx(100 * np.std([0, 0.5, 0, 0], ddof=1) / 2)
    assert points_lost(strong, strong) == (0, 0)
    two = {**strong, "b": [outcome([1, 1])]}
    assert points_lost(two, {**other, "b": [outcome([1, 1])]}) == (6.25, error / 2)


def test_pseudo_values_of_a_mean_have_its_error():
    numbers = np.random.default_rng(0).normal(0, 1, 2000)
    values = left_out(lambda texts: float(numbers[texts].mean()), len(numbers))
    assert len(values) == GROUPS and values.mean() == pytest.approx(numbers.mean())
    assert error_of(values) == pytest.approx(error_of(numbers), rel=0.5)


def test_other_scores_than_accuracy_have_pseudo_values():
    made = measured(texts=400)
    several = replace(made, task=replace(made.task, one_label_a_row=False))
    assert len(values_of(several, made.answers[0])) == GROUPS
    assert values_of(several, made.answers[0]).mean() == pytest.approx(made.scores[0], abs=1e-6)
    some = np.arange(0, 400, 3)
    assert values_of(made, made.answers[0], some).mean() == made.score(some, [made.answers[0][i] for i in some])


def test_a_difference_to_itself_has_no_error_and_the_jackknife_agrees():
    own = answers(texts=400)
    strong, other = own.outcome(own.alone(2)), own.outcome(own.alone(0))
    assert points_between(strong, strong).error == 0
    small = next(iter(candidates(own.measured)))
    assert points_between(other, strong).error == pytest.approx(100 * small.error, rel=0.6)


def test_a_ratio_of_costs_knows_that_texts_are_paired():
    seconds = np.random.default_rng(0).uniform(1, 9, 100)
    half = ratio_between(seconds / 2, seconds)
    assert (half.value, half.error) == (pytest.approx(0.5), pytest.approx(0, abs=1e-12))
    assert ratio_between(seconds[::-1], seconds).error > 0.01
