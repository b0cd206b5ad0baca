"""Which of some plans is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from builder.cascade.candidates import Candidate
from builder.cascade.selection import Target, described, front_of, select
from hplm.errors import InvalidInput
from hplm.levels.plan import Plan, Step
from tests.support.message import mentioning


def candidate(score, milliseconds, *levels):
    steps = [Step(level, 0.9, 4.0, weight=1.0 if not number else 0.6) for number, level in enumerate(levels or (0,))]
    return Candidate(Plan(tuple(steps)), score, milliseconds / 1000, milliseconds / 1000, 0.0)


STRONG, CASCADE, FAST, WEAK = candidate(0.93, 4, 1), candidate(0.928, 2.5, 0, 1), candidate(0.9, 2, 0, 1), candidate(0.8, 1, 0)
FRONT = [STRONG, CASCADE, FAST, WEAK]


def test_the_front_has_no_plan_that_another_one_beats():
    worse = [candidate(0.927, 2.6), candidate(0.8, 1.5), candidate(0.9, 2.5), candidate(0.93, 4.1, 0, 1)]
    assert front_of([*worse, WEAK, STRONG, FAST, CASCADE], own=1) == FRONT


def test_a_plan_with_a_large_error_is_not_on_the_front():
    lucky = replace(CASCADE, error=0.01)
    near = candidate(0.927, 2.6, 0, 1)
    assert front_of([STRONG, lucky, near, FAST], own=1) == [STRONG, near, lucky, FAST]
    assert front_of([STRONG, replace(lucky, error=0.03), near, FAST], own=1) == [STRONG, near, FAST]


def test_the_own_level_stays_beside_a_plan_that_seems_better():
    lucky = candidate(0.94, 2.5, 0, 1)
    assert front_of([STRONG, lucky, WEAK], own=1) == [STRONG, lucky, WEAK]


def test_a_score_is_trusted_less_by_its_error():
    near, sure = replace(CASCADE, error=0.01), replace(FAST, score=0.929, error=0.001)
    front = [STRONG, near, sure, WEAK]
    assert select(front, Target(drop=0.5), 0.93)[0] == sure
    assert select([STRONG, near, WEAK], Target(drop=0.5), 0.93)[0] == STRONG
    assert select([STRONG, near, WEAK], Target(drop=0.5, doubt=0), 0.93)[0] == near
    assert select([STRONG, near, WEAK], Target(drop=2), 0.93)[0] == near


def test_the_fastest_plan_that_meets_the_target_comes_first_and_then_cheaper_ones():
    assert select(FRONT, Target(drop=0.5), 0.93) == [CASCADE, FAST, WEAK]
    assert select(FRONT, Target(drop=0), 0.93) == FRONT
    assert select(FRONT, Target(accuracy=0.85), 0.93) == [FAST, WEAK]
    assert select(FRONT, Target(accuracy=0.5), 0.93) == [WEAK]
    assert select(FRONT, Target(drop=1.0, latency_ms=2.5), 0.93) == [CASCADE, FAST, WEAK]


def test_a_rung_is_clearly_cheaper_than_the_one_above():
    near = [candidate(0.95 - number / 1000, 4 - number / 10) for number in range(20)]
    ladder = select(near, Target(drop=0), 0.95)
    assert ladder[0] == near[0] and len(ladder) > 3
    assert all(below.mean <= 0.9 * above.mean for above, below in pairwise(ladder))


@pytest.mark.parametrize(
    ("target", "things"),
    [
        (Target(accuracy=0.95), ("0.9500", "0.9300", 4)),
        (Target(accuracy=0.93, latency_ms=3), ("0.9300", "3 ms", "0.9280", 2.5)),
        (Target(drop=0.5, latency_ms=0.5), ("0.9250", "0.5 ms", "0.8000", 1)),
    ],
)
def test_a_target_out_of_reach_names_the_best_plan(target, things):
    with pytest.raises(InvalidInput, match=mentioning(*things)):
        select(FRONT, target, 0.93)


@pytest.mark.parametrize(
    "given",
    [{}, {"drop": 0.5, "accuracy": 0.9}, {"drop": -1}, {"accuracy": 93}, {"accuracy": float("nan")}, {"drop": 0.5, "doubt": -1},
     {"drop": 0.5, "latency_ms": 0}, {"drop": 0.5, "latency_ms": float("nan")}],
)  # fmt: skip
def test_a_target_that_makes_no_sense_is_refused(given):
    with pytest.raises(InvalidInput):
        Target(**given)


def test_a_plan_is_described_by_its_levels_and_numbers():
    assert described(WEAK) == "level 1 alone"
    assert described(CASCADE, ["small", "own"]) == "levels small -> own (c 0.9, k 4)"
