"""Which stacks the plans of several tenants share, by numbers that are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from builder.cascade.candidates import Candidate
from builder.cascade.common_stacks import Choice, Tenants, best
from builder.cascade.ladder import choose_ladders
from builder.cascade.levels import OWN
from builder.cascade.profile import Profile
from builder.cascade.selection import Target, best_of_each, ladder_below
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


def test_a_batch_takes_the_time_of_its_sheets():
    """Each tenant has 500 of 1,000 tokens."""
    alone = candidate(0.9, (2,), (1.0,))
    tenants = Tenants({"a": profile(ONE), "b": profile(TWO)})
    assert tenants.batch == 1000
    assert tenants.seconds(tenants.alone(), 1000) == pytest.approx(0.045)
    # 500 tokens in the first stack (10 ms), and 500 + 200 in the full one (33 ms).
    assert tenants.seconds({"a": ONE, "b": alone}, 1000) == pytest.approx(0.043)
    # The first and the second stack with 500 tokens each (10 and 15 ms), the full one with 200 + 75 (16 ms).
    assert tenants.seconds({"a": ONE, "b": TWO}, 1000) == pytest.approx(0.041)
    assert tenants.choice({"a": ONE, "b": alone}).work == pytest.approx((0.65 + 1) / 2)


def test_a_tenant_with_longer_texts_has_more_of_a_batch():
    long = [sheets(5, 0.01, 30), sheets(5, 0.02, 30), sheets(5, 0.04, 30)]
    tenants = Tenants({"a": profile(ONE), "b": profile(times=long)})
    # 250 tokens in the first stack (7.5 ms), 750 + 100 in the full one (39 ms).
    assert tenants.seconds({"a": ONE, "b": tenants.alone()["b"]}, 1000) == pytest.approx(0.0465)


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


def test_small_differences_go_to_fewer_stacks():
    plain = Choice({}, (), 1.0, 1.0)
    one, other, both = (
        replace(plain, stacks=stacks, seconds=seconds)
        for stacks, seconds in ((("a",), 0.98), (("b",), 0.95), (("a", "b"), 0.93))
    )
    assert best([plain, one]) == plain
    assert best([plain, one, other]) == other
    fewer, more = replace(one, seconds=1.03), replace(both, seconds=1.0)
    assert best([fewer, more]) == fewer and best([replace(fewer, seconds=1.0305), more]) == more
    assert best([plain, one, other, both]) == other
    assert best([plain, one, replace(both, seconds=0.9)]).stacks == ("a", "b")


def test_a_choice_of_stacks_without_a_plan_for_each_tenant_does_not_count():
    """Tenant `b` reaches the score only with stack two."""
    better = candidate(0.95, (1, 2), (1.0, 1.0))
    choices = Tenants({"a": profile(ONE), "b": profile(better)}).choices(Target(accuracy=0.92))
    assert not choices, "`a` reaches it with none"
    choices = Tenants({"a": profile(ONE, better), "b": profile(better)}).choices(Target(accuracy=0.92))
    assert [one.stacks for one in choices] == [("two",)]


def test_rungs_below_need_no_other_stacks_while_these_make_them_cheaper():
    weak, cheap, alone = (candidate(score, (0, 2), (1.0, share)) for score, share in ((0.9, 0.5), (0.85, 0.2), (0.8, 0.05)))
    quicker = candidate(0.87, (1,), (1.0,))
    least = replace(candidate(0.7, (1,), (1.0,)), mean=0.00001)
    own = profile(weak, cheap, alone, quicker, least)
    assert quicker in own.front and quicker not in own.front_within(["one"])
    ladder = ladder_below(weak, own.front_within(["one"]), own.front)
    assert ladder == [weak, cheap, alone, least]
    assert all(below.mean <= 0.9 * above.mean for above, below in pairwise(ladder))


def test_a_profile_keeps_the_front_of_each_choice_of_levels():
    weak = candidate(0.9, (0, 2), (1.0, 0.5))
    beaten = candidate(0.89, (0, 2), (1.0, 0.6))
    own = profile(TWO, weak, beaten)
    assert weak not in own.front and beaten not in own.plans
    assert own.front_within(["one"]) == [own.own_alone, weak]
    assert own.front_within([]) == [own.own_alone]


class Counted(Profile):
    """Counts how often its times are read."""

    reads = 0

    @property
    def times(self):
        Counted.reads += 1
        return TIMES


def test_the_time_of_a_batch_is_reckoned_in_steps_that_grow_with_the_tenants(monkeypatch):
    plain = profile(ONE)
    monkeypatch.setattr(Counted, "reads", 0)
    tenants = Tenants({str(number): Counted(plain.plans, plain.asked, plain.report) for number in range(50)})
    tenants.choice(dict.fromkeys(tenants.profiles, ONE))
    assert Counted.reads <= 10 * 50


@pytest.mark.parametrize(("count", "sizes"), [(4, {0, 1, 2, 3, 4}), (9, {0, 1, 2, 3, 9})])
def test_of_many_stacks_only_small_sets_and_all_are_tried(monkeypatch, count, sizes):
    tenants, tried = Tenants({"a": profile(ONE)}), set()
    monkeypatch.setitem(tenants.__dict__, "stacks", [str(number) for number in range(count)])
    monkeypatch.setattr(Tenants, "_plans", lambda self, stacks, target: tried.add(len(stacks)))
    tenants.choices(TARGET)
    assert tried == sizes


@pytest.mark.parametrize("other", [("bf16", "cpu"), ("fp32", "cuda")])
def test_times_of_different_precisions_or_devices_are_not_added_up(other):
    profiles = {
        id: replace(profile(ONE), asked=dict(zip(("precision", "device"), measure, strict=True)))
        for id, measure in (("a", ("fp32", "cpu")), ("b", other))
    }
    with pytest.raises(InvalidInput, match=mentioning("a in fp32 on cpu", "b in", *other, "hplm cascade profile --again")):
        choose_ladders(None, [], profiles, TARGET)  # type: ignore[arg-type]
