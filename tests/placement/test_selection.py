"""Algorithm 1, held to an exhaustive search of tiny cases."""

from itertools import product

import pytest

from hplm.errors import InvalidInput
from hplm.placement.partition import Parallel, groups_of
from hplm.placement.search import search
from hplm.placement.selection import beam, completed, fast
from tests.placement.problems import problem_of
from tests.support.message import refusing


def _exhaustive(problem, groups):
    """Returns the best share of all ways to put units into groups that fit."""
    best = 0.0
    places = list(product(range(len(groups)), [unit.name for unit in problem.units]))
    for chosen in product((False, True), repeat=len(places)):
        filled = groups
        for (at, unit), wanted in zip(places, chosen, strict=True):
            if wanted and filled is not None:
                filled = problem.room.added(filled, at, unit)
        if filled is not None:
            best = max(best, problem.screen.attained(filled).share)
    return best


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("stages, memory_mb", [(1, 40), (1, 80), (2, 20), (2, 40)])
def test_a_wide_beam_is_an_exhaustive_search(stages, memory_mb, seed):
    problem = problem_of(8.0, 6.0, 8.0, devices=2, memory_mb=memory_mb, rate=110.0, seed=seed, seconds=10.0)
    groups = groups_of(problem, Parallel(stages, 1))
    assert beam(problem, groups, 1000).share == _exhaustive(problem, groups)


def test_the_heuristic_is_nearly_as_good_as_the_beam_and_screens_less():
    problem = problem_of(8.0, 6.0, 9.0, 7.0, devices=4, memory_mb=80, rate=220.0)
    groups = groups_of(problem, Parallel(1, 1))
    wide, quick = beam(problem, groups), fast(problem, groups)
    assert quick.share >= 0.95 * wide.share and quick.screened < wide.screened / 3


def test_a_unit_that_would_make_others_late_is_left_out():
    problem = problem_of(1.0, 100.0, devices=1, memory_mb=80, rate=300.0, scale=2.0)
    groups = problem.room.added(groups_of(problem, Parallel(1, 1)), 0, "b0/law")
    assert groups is not None and completed(problem, groups) == groups
    silent = problem.of({"b0/law", "b1/law"}).on(problem.trace.only(problem.trace.unit == 0))
    assert completed(silent, groups)[0].units == ("b0/law", "b1/law")


def test_a_unit_is_put_where_its_backbone_is_cut_around_full_devices():
    problem = problem_of(8.0, 8.0, devices=2, memory_mb=40)
    groups = groups_of(problem, Parallel(2, 1))
    for unit in problem.units:
        groups = problem.room.added(groups, 0, unit.name) or groups
    assert set(groups[0].cuts) == {"b0", "b1"}
    assert problem.room.added(groups, 0, "b0/law") is None  # it is there


def test_a_backbone_that_fits_no_machine_is_named_with_its_bytes():
    with refusing(InvalidInput, "b0", "40,000,000", "30,000,000", "cpu:0"):
        search(problem_of(8.0, devices=2, memory_mb=15))
