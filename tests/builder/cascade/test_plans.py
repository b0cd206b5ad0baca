"""Plans tried on known answers, against a loop that follows the equations text by text; what they cost, and the chosen one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from builder.cascade.candidates import CUTOFFS, Candidate, candidates, most_pruning, tried
from builder.cascade.report.answers import Answers
from builder.cascade.report.outcomes import Outcome, points_between, points_lost, ratio_between
from builder.cascade.report.ways import CASCADE, INFAAS, ORACLE, RANDOM, STRONG, ways_of
from builder.cascade.selection import Target, front_of, select
from builder.cascade.sheet_times import SheetTimes, timed
from hplm.errors import InvalidInput
from hplm.levels.plan import Plan, Step
from tests.builder.cascade.measured import LABELS, measured
from tests.support.message import mentioning


@pytest.fixture(scope="module")
def known():
    return measured()


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
def test_a_plan_is_tried_as_an_engine_takes_it_and_reported_so(known, levels, cutoff, slope, alpha):
    one = tried(known, levels, cutoff, slope, alpha)
    answers, seconds, steps, passes = zip(*through(known, one), strict=True)
    right = [answer == example.labels[0] for answer, example in zip(answers, known.examples, strict=True)]
    assert one.score == pytest.approx(np.mean(right))
    assert (one.mean, one.tail) == (pytest.approx(np.mean(seconds)), pytest.approx(np.percentile(seconds, 75)))
    assert one.plan.cost == pytest.approx(sum(passes) / known.whole[-1].tokens.sum())
    assert one.reached == pytest.approx([np.mean([count > number for count in steps]) for number in range(len(levels))])
    own = Answers(known)
    found = own.outcome(own.through(one.plan))
    assert (found.score, float(found.seconds.mean())) == (pytest.approx(one.score), pytest.approx(one.mean))
    assert found.went_on == pytest.approx(one.reached[1:])
    assert (found.unread / found.words if found.words else 0) == pytest.approx(one.pruned)


def test_the_error_of_a_score_is_that_of_the_difference_to_the_own_level(known):
    one = tried(known, (0, 2), 0.2, 16.0)
    labels = [example.labels[0] for example in known.examples]
    right = np.array([answer == label for (answer, *_), label in zip(through(known, one), labels, strict=True)])
    own = np.array([LABELS[logits[0].argmax()] == label for logits, label in zip(known.whole[-1].logits, labels, strict=True)])
    plain = (right.astype(float) - own).std() / np.sqrt(len(labels))
    assert 0.5 * plain < one.error < 2 * plain  # of twenty groups, an estimate of an estimate
    assert one.trusted == pytest.approx(one.score - 1.5 * one.error)
    assert tried(known, (2,)).error == 0


def test_one_pruning_is_chosen_and_no_plan_is_worse_than_its_levels(known):
    found = list(candidates(known))
    assert {len(one.plan.steps) for one in found} == {1, 2, 3}
    assert all(one.score >= np.mean([known.scores[step.level] for step in one.plan.steps]) for one in found)
    pairs = [one.plan.steps[0].cutoff for one in found if [step.level for step in one.plan.steps] == [0, 2]]
    assert max(pairs) == 0.95 and min(pairs) > CUTOFFS[-1]  # it ended before the lowest cutoff
    assert most_pruning(known, (0, 2)) == most_pruning(known, (0, 1, 2)) == 0.7
    assert {one.plan.steps[0].alpha for one in found if len(one.plan.steps) == 2} == {0.0, 0.7}
    pruned = [one.pruned for one in found if one.plan.steps[0].alpha and one.reached[1] > 0.1]
    assert pruned and all(0.3 < share < 0.45 for share in pruned)
    assert {one.plan.steps[0].alpha for one in candidates(measured(prune=False))} == {0.0}


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


def test_simpler_ways_are_ordered_as_their_knowledge_is():
    plan, own = Plan((Step(0, 0.7, 16.0, 0.6), Step(2, weight=0.6))), Answers(measured(1000))
    scores = own.measured.scores
    ways = ways_of(own, plan, scores, 100.0)
    assert ways[STRONG].score == scores[2] and ways[INFAAS].score == scores[0]  # a drop of 100 points allows every level
    assert ways_of(own, plan, scores, 0.0)[INFAAS].score == scores[2]
    assert ways[ORACLE].score > ways[CASCADE].score > ways[RANDOM].score
    assert ways[RANDOM].went_on == ways[CASCADE].went_on
    cutoff = own.cheapest_hard_cut(0, 2, 5.0)
    assert own.outcome(own.by_hard_cut(0, 2, cutoff)).score >= scores[2] - 0.05
    assert own.outcome(own.by_hard_cut(0, 2, round(cutoff - 0.05, 2))).score < scores[2] - 0.05


def outcome(right):
    right = np.array(right, dtype=float)
    return Outcome(float(right.mean()), right, np.ones(len(right)), np.ones(len(right)))


def test_differences_are_of_the_same_texts():
    """Two tenants: the second text is lost by one of them. The error is that of the mean over four texts."""
    strong = {"a": [outcome([1, 1, 0, 0]), outcome([1, 1, 0, 0])]}
    other = {"a": [outcome([1, 1, 0, 0]), outcome([1, 0, 0, 0])]}
    points, error = points_lost(strong, other)
    assert (points, error) == (12.5, pytest.approx(100 * np.std([0, 0.5, 0, 0], ddof=1) / 2))
    two = {**strong, "b": [outcome([1, 1])]}
    assert points_lost(strong, strong) == (0, 0)
    assert points_lost(two, {**other, "b": [outcome([1, 1])]}) == (6.25, error / 2)
    assert points_between(strong["a"][0], strong["a"][0]).error == 0
    seconds = np.random.default_rng(0).uniform(1, 9, 100)
    half = ratio_between(seconds / 2, seconds)
    assert (half.value, half.error) == (pytest.approx(0.5), pytest.approx(0, abs=1e-12))
    assert ratio_between(seconds[::-1], seconds).error > 0.01


TIMES = SheetTimes((20, 40, 400), (0.2, 0.3, 2.0), (0.4, 0.6, 4.0))


@dataclass
class Level:
    """Takes `fixed` for each sheet, `token` for each token, and twice as long while it is watched."""

    fixed: float
    token: float

    def seconds(self, texts, tokens, rows, watch=False):
        return (1 + watch) * (self.fixed + self.token * texts * tokens)


def test_a_token_costs_by_its_sheet():
    for tokens, seconds in {400: 0.005, 40: 0.0075, 20: 0.01, 0: 0.01, 4000: 0.005, 220: 1.15 / 220}.items():
        assert TIMES.of_token(tokens) == pytest.approx(seconds)
        assert TIMES.of_token(tokens, watched=True) == pytest.approx(2 * seconds)
    assert SheetTimes.read(TIMES.stored()) == TIMES


def test_sheets_grow_up_to_what_the_own_level_computes_in_fifty_milliseconds():
    """40 texts of 25 tokens take 10 + 40 ms. Sheets of 1, 2, 4 ... 32 texts are below; 64 take 74 ms, and 43 of them 50."""
    small, own = timed([Level(0.005, 0.00001), Level(0.010, 0.00004)], 25, 1, watched=1)
    assert own.tokens == small.tokens == (25, 50, 100, 200, 400, 800, 43 * 25)
    assert own.seconds == pytest.approx([0.011, 0.012, 0.014, 0.018, 0.026, 0.042, 0.053])
    assert small.seconds[-1] == pytest.approx(0.01575) and small.watched[-1] == pytest.approx(0.0315)
    assert own.watched == own.seconds, "nothing goes on from the own level"


def test_the_last_step_of_a_plan_has_a_small_sheet():
    """Sheets take 10 ms besides 0.1 ms a token: a batch of 1,000 tokens 110 ms, 100 of them 20 ms."""
    known = measured()
    known.times[:] = [SheetTimes((20, 1000), (0.012, 0.110), (0.024, 0.220))] * 3
    pruned, plain = tried(known, (0, 2), 0.6, 16.0, 0.7), tried(known, (0, 2), 0.6, 16.0)
    assert pruned.shares[0] == 1 and 0 < pruned.shares[1] < min(pruned.reached[1], plain.shares[1]), "words were left out"
    for one, first in ((pruned, 0.220), (plain, 0.110)):  # of the pruned one the first level is watched
        taken = one.mean * len(known.examples) / known.whole[2].tokens.sum() * 1000
        assert taken == pytest.approx(first + 0.010 + 0.1 * one.shares[1])


def candidate(score, milliseconds, *levels, error=0.0):
    steps = [Step(level, 0.9, 4.0, weight=1.0 if not number else 0.6) for number, level in enumerate(levels or (0,))]
    return replace(Candidate(Plan(tuple(steps)), score, milliseconds / 1000, milliseconds / 1000, 0.0), error=error)


OWN, MIDDLE, FAST, WEAK = candidate(0.93, 4, 1), candidate(0.928, 2.5, 0, 1), candidate(0.9, 2, 0, 1), candidate(0.8, 1, 0)
FRONT = [OWN, MIDDLE, FAST, WEAK]


def test_the_front_has_no_plan_that_another_one_beats_nor_one_with_a_large_error():
    worse = [candidate(0.927, 2.6), candidate(0.8, 1.5), candidate(0.9, 2.5), candidate(0.93, 4.1, 0, 1)]
    assert front_of([*worse, WEAK, OWN, FAST, MIDDLE], own=1) == FRONT
    lucky, near = replace(MIDDLE, error=0.01), candidate(0.927, 2.6, 0, 1)
    assert front_of([OWN, lucky, near, FAST], own=1) == [OWN, near, lucky, FAST]
    assert front_of([OWN, replace(lucky, error=0.03), near, FAST], own=1) == [OWN, near, FAST]
    better = candidate(0.94, 2.5, 0, 1)
    assert front_of([OWN, better, WEAK], own=1) == [OWN, better, WEAK], "the own level stays"


def test_the_fastest_plan_that_surely_meets_the_target_comes_first_and_then_clearly_cheaper_ones():
    for target, ladder in [
        (Target(drop=0.5), [MIDDLE, FAST, WEAK]),
        (Target(drop=0), FRONT),
        (Target(accuracy=0.85), [FAST, WEAK]),
        (Target(accuracy=0.5), [WEAK]),
        (Target(drop=1.0, latency_ms=2.5), [MIDDLE, FAST, WEAK]),
    ]:
        assert select(FRONT, target, 0.93) == ladder
    near, sure = replace(MIDDLE, error=0.01), replace(FAST, score=0.929, error=0.001)
    assert select([OWN, near, sure, WEAK], Target(drop=0.5), 0.93)[0] == sure
    assert select([OWN, near, WEAK], Target(drop=0.5), 0.93)[0] == OWN
    assert select([OWN, near, WEAK], Target(drop=0.5, doubt=0), 0.93)[0] == near
    ladder = select([candidate(0.95 - number / 1000, 4 - number / 10) for number in range(20)], Target(drop=0), 0.95)
    assert len(ladder) > 3 and all(below.mean <= 0.9 * above.mean for above, below in pairwise(ladder))
    for target, things in [
        (Target(accuracy=0.95), ("0.9500", "0.9300", 4)),
        (Target(accuracy=0.93, latency_ms=3), ("0.9300", "3 ms", "0.9280", 2.5)),
        (Target(drop=0.5, latency_ms=0.5), ("0.9250", "0.5 ms", "0.8000", 1)),
    ]:
        with pytest.raises(InvalidInput, match=mentioning(*things)):
            select(FRONT, target, 0.93)
