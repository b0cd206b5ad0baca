"""Which stacks the plans of several tenants share, by numbers that are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.cascade.candidates import Candidate
from builder.cascade.common_stacks import Tenants, best
from builder.cascade.ladder import choose_ladders
from builder.cascade.levels import OWN
from builder.cascade.profile import Profile
from builder.cascade.selection import Target, best_of_each
from builder.cascade.sheet_times import SheetTimes
from hplm.errors import InvalidInput
from hplm.levels.plan import Plan, Step
from tests.support.message import mentioning

NAMES = ("one", "two", OWN)
TARGET = Target(drop=0.5)


def sheets(fixed, token, text=10):
    """A sheet takes `fixed` milliseconds, and each token `token`."""
    tokens = (text, 1000)
    taken = tuple((fixed + token * own) / 1000 for own in tokens)
    return SheetTimes(tokens, taken, taken)


TIMES = [sheets(5, 0.01), sheets(5, 0.02), sheets(5, 0.04)]


def candidate(score, levels, shares, times=TIMES, cost=1.0):
    """A plan of a tenant whose texts have 10 tokens, with its seconds in batches of its own."""
    mean = 10 * sum(share * times[level].of_token(1000 * share) for level, share in zip(levels, shares, strict=True))
    steps = tuple(Step(level, 0.5, 64.0) for level in levels)
    return Candidate(Plan(steps, cost), score, mean, mean, 0.0, tuple(shares))


def profile(*plans, times=TIMES):
    alone = candidate(0.9, (2,), (1.0,), times)
    levels = [{"name": name, "score": 0.9, "sheets": own.stored()} for name, own in zip(NAMES, times, strict=True)]
    return Profile(best_of_each([alone, *plans], 2), {}, {"metric": "accuracy", "levels": levels})


ONE, TWO = candidate(0.9, (0, 2), (1.0, 0.4), cost=0.65), candidate(0.9, (1, 2), (1.0, 0.15), cost=0.65)


def test_tenants_that_like_different_stacks_share_one():
    """Alone, `a` is best with stack one and `b` with stack two. Together, each further stack takes 5 ms."""
    weak = candidate(0.9, (0, 2), (1.0, 0.5), cost=0.75)
    a, b = profile(ONE), profile(TWO, weak)
    tenants = Tenants({"a": a, "b": b})
    assert b.front[-1] == TWO, "its weak plan is not on its front"
    by_stacks = {one.stacks: one for one in tenants.choices(TARGET)}
    assert set(by_stacks) == {(), ("one",), ("two",), ("one", "two")}
    assert by_stacks[()].seconds == pytest.approx(0.045)
    assert by_stacks["one",].plans == {"a": ONE, "b": weak}
    assert by_stacks["one",].seconds == pytest.approx(0.015 + 0.005 + 0.04 * 0.45)
    assert by_stacks["two",].seconds == pytest.approx(0.015 + 0.005 + 0.04 * 0.575)
    assert by_stacks["one", "two"].seconds == pytest.approx(0.041)
    assert best(list(by_stacks.values())).stacks == ("one",)


def test_a_choice_of_stacks_without_a_plan_for_each_tenant_does_not_count():
    """Tenant `b` reaches the score only with stack two."""
    better = candidate(0.95, (1, 2), (1.0, 1.0))
    choices = Tenants({"a": profile(ONE), "b": profile(better)}).choices(Target(accuracy=0.92))
    assert not choices, "`a` reaches it with none"
    choices = Tenants({"a": profile(ONE, better), "b": profile(better)}).choices(Target(accuracy=0.92))
    assert [one.stacks for one in choices] == [("two",)]


def test_times_of_different_precisions_are_not_added_up():
    dtypes = {"a": "fp32", "b": "bf16"}
    profiles = {id: replace(profile(ONE), asked={"precision": dtype, "device": "cpu"}) for id, dtype in dtypes.items()}
    with pytest.raises(InvalidInput, match=mentioning("a in fp32 on cpu", "b in bf16", "hplm cascade profile --again")):
        choose_ladders(None, [], profiles, TARGET)  # type: ignore[arg-type]
