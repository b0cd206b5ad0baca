"""Plans as they are stored."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from hplm.levels.plan import Plan, Step

PLAN = Plan((Step(0, cutoff=0.95, slope=4.0, alpha=0.7), Step(2, weight=0.6)), cost=0.8)


def stored(**changed):
    return {"steps": [{**asdict(PLAN.steps[0]), **changed}, asdict(PLAN.steps[1])]}


def test_a_plan_is_read_as_it_was_written():
    assert Plan.read(json.loads(json.dumps(asdict(PLAN)))) == PLAN


def test_a_plan_of_an_earlier_version_costs_as_much_as_the_full_stack():
    older = asdict(PLAN)
    del older["cost"]
    assert Plan.read(older) == Plan(PLAN.steps, cost=1.0)


@pytest.mark.parametrize("cost", [0, -1.0, "1", True, None, float("nan"), float("inf")])
def test_a_cost_that_makes_no_sense_is_refused(cost):
    with pytest.raises(TypeError, match="cost"):
        Plan.read({**asdict(PLAN), "cost": cost})


def test_a_plan_suits_a_tenant_that_has_its_deepest_level():
    assert [PLAN.suits(levels) for levels in (0, 1, 2, 3)] == [False, False, False, True]
    assert Plan((Step(0),)).suits(1)


@pytest.mark.parametrize(
    "changed",
    [
        {"level": -1}, {"level": 2}, {"level": 3}, {"level": 0.0}, {"level": True}, {"cutoff": 1.1}, {"cutoff": -1.1},
        {"cutoff": "high"},
        {"slope": -1.0}, {"slope": float("inf")}, {"alpha": float("nan")}, {"weight": 0.5}, {"weight": True}, {"members": 3},
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(changed):
    with pytest.raises(TypeError):
        Plan.read(stored(**changed))


@pytest.mark.parametrize("broken", [{"steps": []}, {"steps": [{"level": 0}]}, {"steps": 3}])
def test_a_plan_without_steps_or_with_half_of_one_is_refused(broken):
    with pytest.raises(TypeError):
        Plan.read(broken)
