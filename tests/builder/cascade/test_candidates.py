"""Plans tried on answers that are known already, against a loop over texts that follows the equations one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from builder.cascade.candidates import CUTOFFS, MOST_TAIL, candidates, most_pruning, tried
from hplm.levels.plan import Plan, Step
from tests.builder.cascade.measured import LABELS, measured


@pytest.fixture(scope="module")
def known():
    return measured()


@pytest.fixture(scope="module")
def found(known):
    return list(candidates(known))


def probabilities(logits, temperature=1.0):
    powers = np.exp(np.float64(logits[0]) / temperature)
    return powers / powers.sum()


def through(known, candidate):
    """Returns the answer to each text, its seconds, its steps, and its tokens times layers, text by text."""
    outcomes, first = [], candidate.plan.steps[0]
    for text in range(len(known.examples)):
        seconds, passes, before = 0.0, 0.0, None
        for number, step in enumerate(candidate.plan.steps):
            read = known.whole if not number else {step.level: known.read(first.level, step.level, first.alpha)}
            own = read[step.level]
            seconds += float(own.tokens[text]) * known.times[step.level].of_token(1000)  # the same in every sheet here
            passes += known.depths[step.level] * own.tokens[text]
            now = own.logits[text]
            if before is not None:
                now = np.log(step.weight * probabilities(now) + (1 - step.weight) * probabilities(before))[None]
            sure, before = probabilities(now, 2.0).max(), now
            norm = (sure - step.cutoff) / (1 - step.cutoff) - 0.5
            if sure > step.cutoff and known.draws[min(number, 1), text] >= 1 / (1 + np.exp(step.slope * norm)):
                break
        outcomes.append((LABELS[before[0].argmax()], seconds, number + 1, passes))
    return outcomes


@pytest.mark.parametrize("levels", [(0,), (0, 2), (1, 2), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(("cutoff", "slope", "alpha"), [(0.8, 4.0, 0.0), (0.6, 16.0, 0.7)])
def test_a_plan_is_tried_as_an_engine_takes_it(known, levels, cutoff, slope, alpha):
    one = tried(known, levels, cutoff, slope, alpha)
    answers, seconds, steps, passes = zip(*through(known, one), strict=True)
    right = [answer == example.labels[0] for answer, example in zip(answers, known.examples, strict=True)]
    assert one.score == pytest.approx(np.mean(right))
    assert (one.mean, one.tail) == (pytest.approx(np.mean(seconds)), pytest.approx(np.percentile(seconds, 75)))
    assert one.plan.cost == pytest.approx(sum(passes) / known.whole[-1].tokens.sum())
    assert one.reached == pytest.approx([np.mean([count > number for count in steps]) for number in range(len(levels))])


def test_a_plan_whose_texts_all_go_on_scores_as_its_last_level_and_one_level_as_itself(known):
    every = tried(known, (0, 2), 1.0, 4.0)
    assert (every.reached, every.score, every.error) == ([1.0, 1.0], known.scores[2], 0)
    assert tried(known, (2,)).score == known.scores[2]
    assert tried(known, (2,)).plan == Plan((Step(2),))
    assert tried(known, (0,)).plan.cost == 0.25


def test_the_error_of_a_score_is_that_of_the_difference_to_the_own_level(known):
    one = tried(known, (0, 2), 0.2, 16.0)
    labels = [example.labels[0] for example in known.examples]
    right = np.array([answer == label for (answer, *_), label in zip(through(known, one), labels, strict=True)])
    own = np.array([LABELS[logits[0].argmax()] == label for logits, label in zip(known.whole[-1].logits, labels, strict=True)])
    plain = (right.astype(float) - own).std() / np.sqrt(len(labels))
    assert 0.5 * plain < one.error < 2 * plain  # of twenty groups, an estimate of an estimate
    assert one.trusted == pytest.approx(one.score - 1.5 * one.error)
    assert tried(known, (2,)).error == 0


def test_every_plan_scores_at_least_the_mean_of_its_levels(known, found):
    assert {len(one.plan.steps) for one in found} == {1, 2, 3}
    for one in found:
        levels = [step.level for step in one.plan.steps]
        assert one.score >= np.mean([known.scores[level] for level in levels])
    pairs = [one.plan.steps[0].cutoff for one in found if [step.level for step in one.plan.steps] == [0, 2]]
    assert max(pairs) == 0.95 and min(pairs) > CUTOFFS[-1]  # it ended before the lowest cutoff


def test_a_cascade_of_a_weak_and_a_strong_level_keeps_the_score_at_less_cost(known, found):
    cheapest = min((one for one in found if one.score >= known.scores[2] - 0.005), key=lambda one: one.mean)
    assert len(cheapest.plan.steps) > 1 and cheapest.mean < 0.8 * tried(known, (2,)).mean


def test_one_pruning_is_chosen_before_any_plan_is_tried(known, found):
    assert most_pruning(known, (0, 2)) == most_pruning(known, (0, 1, 2)) == 0.7
    assert {one.plan.steps[0].alpha for one in found if len(one.plan.steps) == 2} == {0.0, 0.7}
    pruned = [one for one in found if one.plan.steps[0].alpha and one.reached[1] > 0.1]
    assert pruned and all(0.3 < one.pruned < 0.45 for one in pruned)
    assert all(one.pruned == 0 for one in found if not one.plan.steps[0].alpha)
    assert {one.plan.steps[0].alpha for one in candidates(measured(prune=False))} == {0.0}


def test_pruning_that_changes_a_few_answers_is_trusted_only_with_enough_texts():
    """Of a hundred texts two become right and two wrong by it: nothing is lost, but with few texts nobody knows."""

    def known(texts):
        known = measured(texts)

        def swapped(first, later, alpha):
            logits = list(known.whole[later].logits)
            wins, loses = (
                [i for i in range(texts) if (known.answers[later][i][0] == known.examples[i].labels[0]) == is_right]
                for is_right in (False, True)
            )
            for i in (*wins[: texts // 50], *loses[: texts // 50]):
                right = np.eye(len(LABELS))[LABELS.index(known.examples[i].labels[0])]
                logits[i] = (right if i in wins else 1 - right)[None].astype(np.float32)
            return replace(known.whole[later], logits=logits)

        return replace(known, pruned=swapped)

    assert most_pruning(known(200), (0, 2)) == 0
    assert most_pruning(known(4000), (0, 2)) == 1.5


def test_a_plan_with_a_longer_tail_than_its_slowest_level_is_dropped(monkeypatch):
    known = measured(levels=2, costs=(3.0, 4.0), prune=False)
    kept = list(candidates(known))
    monkeypatch.setattr("builder.cascade.candidates.MOST_TAIL", np.inf)
    every = list(candidates(known))
    assert 2 < len(kept) < len(every)
    assert kept == [one for one in every if one.tail <= MOST_TAIL * every[1].tail]


def test_a_text_in_several_windows_goes_to_the_last_level_at_once(known):
    windows = replace(known, in_one=np.arange(len(known.examples)) % 2 == 0)
    one, alone = tried(windows, (0, 2), 0.8, 16.0), tried(known, (2,))
    answers = [answer for answer, *_ in through(known, one)]
    odd = [LABELS[logits[0].argmax()] for logits in known.whole[2].logits[1::2]]
    rights = [answer == example.labels[0] for answer, example in zip(answers, known.examples, strict=True)]
    of_odd = [answer == example.labels[0] for answer, example in zip(odd, known.examples[1::2], strict=True)]
    assert one.score == pytest.approx((sum(rights[::2]) + sum(of_odd)) / len(rights))
    assert one.reached[0] == 0.5 and one.reached[1] > 0.5 and 0.5 < one.plan.cost < 1.25
    assert one.mean > 0.5 * alone.mean
