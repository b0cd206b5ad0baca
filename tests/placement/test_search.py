"""Algorithm 2, and Algorithm 1, which fills its groups and is held to an exhaustive search."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hplm.errors import InvalidInput
from hplm.placement.partition import Parallel, backbone_buckets, groups_of, parallels
from hplm.placement.placement import Placement
from hplm.placement.problem import Problem
from hplm.placement.profile import Terms
from hplm.placement.screen import alone_ns
from hplm.placement.search import KEPT, search
from hplm.placement.selection import beam, completed, fast
from hplm.placement.units import units_of
from research.papers.placements import replication
from testing.random_trace import random_trace
from tests.placement.problems import backbone, changed, cluster_of, filled, problem_of, profile_of
from tests.support.message import mentions, refusing

MANY = 10**9
TIMES = backbone().times[1]


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
    problem = problem_of(8.0, 6.0, 8.0, devices=2, memory_mb=memory_mb, rate=110.0, seed=seed, seconds=5.0)
    groups = groups_of(problem, Parallel(stages, 1))
    assert beam(problem, groups, 1000).share == _exhaustive(problem, groups)


def test_the_heuristic_is_nearly_as_good_as_the_beam_and_screens_less():
    problem = problem_of(8.0, 6.0, 9.0, 7.0, devices=4, memory_mb=80, rate=220.0, seconds=5.0)
    groups = groups_of(problem, Parallel(1, 1))
    wide, quick = beam(problem, groups), fast(problem, groups)
    assert quick.share >= 0.95 * wide.share and quick.screened < wide.screened / 3


def test_a_unit_that_would_make_others_late_is_left_out():
    problem = problem_of(1.0, 100.0, devices=1, memory_mb=80, rate=300.0, scale=2.0)
    groups = filled(problem, groups_of(problem, Parallel(1, 1)), (0, "b0"))
    assert completed(problem, groups) == groups
    silent = problem.of({"b0/law", "b1/law"}).on(problem.trace.only(problem.trace.unit == 0))
    assert completed(silent, groups)[0].units == ("b0/law", "b1/law")


@pytest.mark.parametrize("memory_mb, cut", [(80, ((0, 0), (1, 3))), (40, ((0, 1), (2, 3)))])
def test_each_backbone_is_cut_for_its_own_work_as_far_as_devices_have_room(memory_mb, cut):
    """Four layers of 2 ms and 10 MB: with 4 ms of the cores before them, one layer in the first stage is the fastest."""
    problem = changed(problem_of(8.0, 8.0, devices=2, memory_mb=memory_mb), "b1", core=Terms(4e6))
    groups = filled(problem, groups_of(problem, Parallel(2, 1)), (0, "b0"), (0, "b1"))
    assert groups[0].cuts == {"b0": ((0, 1), (2, 3)), "b1": cut}
    assert problem.room.added(groups, 0, "b0/law") is None  # it is there


def test_a_group_gets_no_backbone_that_its_server_could_not_run():
    problem = changed(problem_of(8.0, 8.0, memory_mb=80), "b1", slots=1)
    groups = filled(problem, groups_of(problem, Parallel(1, 1)), (0, "b0"))
    assert problem.room.added(groups, 0, "b1/law") is None


def test_a_backbone_that_fits_no_machine_is_named_with_its_bytes():
    with refusing(InvalidInput, "b0", "40,000,000", "30,000,000"):
        search(problem_of(8.0, devices=2, memory_mb=15))


def test_a_number_of_devices_a_stage_that_makes_no_group_is_named():
    with refusing(InvalidInput, "power of two", "--intra 1"):
        search(changed(problem_of(8.0), "b0", times={3: TIMES}))


def test_backbones_of_unlike_times_are_kept_apart():
    for ms, expected in (
        ((8.0, 8.1, 8.2), [["b0 b1 b2"]]), ((8.0, 16.0), [["b0", "b1"], ["b0 b1"]]), ((8.0, 80.0), [["b0", "b1"]]),
    ):  # fmt: skip
        found = sorted([" ".join(sorted(part)) for part in parts] for parts in backbone_buckets(problem_of(*ms)))
        assert found == expected, f"backbones of {ms} ms are kept apart as {found}, not {expected}"


def test_unlike_backbones_share_a_device_where_there_is_only_one():
    found = search(problem_of(8.0, 80.0, devices=1, memory_mb=80, rate=5.0, scale=20.0))[0]
    assert found.groups[0].units == ("b0/law", "b1/law") and min(found.attained.by_unit.values()) > 0


@pytest.mark.parametrize(
    "devices, measured, parallel, expected",
    [
        (8, (1, 2), (2, 2), [4, 4]),
        (7, (1, 2), (2, 2), [4, 2, 1]),
        (7, (1, 4), (1, 4), [4, 1, 1, 1]),
        (7, (1, 4), (2, 4), [4, 2, 1]),
        (7, (2, 4), (1, 4), [4, 2]),
    ],
)
def test_groups_are_equal_and_the_remainder_is_powers_of_two_that_were_measured(devices, measured, parallel, expected):
    problem = changed(problem_of(8.0), "b0", times=dict.fromkeys(measured, TIMES))
    groups = groups_of(replace(problem, cluster=cluster_of(devices, machines=2)), Parallel(*parallel))
    for machine in ("m0", "m1"):
        assert [len(group.devices) for group in groups if group.machine == machine] == expected
    named = [(group.machine, device) for group in groups for device in group.devices]
    assert len(named) == len(set(named)) == 2 * sum(expected)
    assert all(group.intra in measured and group.stages <= parallel[0] for group in groups)
    assert all(len(group.devices) % group.intra == 0 for group in groups)


def test_a_search_multiplexes_bursts_where_memory_has_room_for_few_replicas():
    problem = problem_of(8.0, 8.0, 8.0, 8.0, devices=4, memory_mb=40, rate=120.0, cv=3.0, scale=5.0)
    found, replicas = search(problem)[0], replication(problem)
    assert found.attained.share > replicas.attained.share + 0.1
    assert any(group.stages > 1 for group in found.groups)
    Placement.of(found.groups, problem.units, problem.cluster, problem.profile).check(problem.cluster, problem.profile)


@pytest.mark.parametrize("rate", [4.0, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_buckets_that_cannot_be_among_the_best_are_left_out_and_nothing_else_changes(seed, rate):
    ms = (3.0 * np.cumprod(np.random.default_rng(seed).uniform(1.15, 1.5, 6))).tolist()
    problem = problem_of(*ms, devices=4, memory_mb=120, rate=rate, seconds=3.0, seed=seed)
    pruned, whole = search(problem), search(problem, kept=MANY)
    assert [own.groups for own in pruned] == [own.groups for own in whole[:KEPT]]
    assert [own.attained.share for own in pruned] == [own.attained.share for own in whole[:KEPT]]
    assert pruned[0].screened - len(pruned) <= whole[0].screened - len(whole)


def test_a_search_says_first_how_many_ways_it_tries():
    said = []
    search(problem_of(8.0, 16.0, devices=2, memory_mb=40), say=said.append)
    assert mentions(said[0], "2 ways", "2 devices", 4)


def test_units_without_requests_are_placed_where_they_fit():
    quiet = backbone(8.0)
    asked = replace(backbone(2.0), tenants={"law": ("a",), "bio": ("b",)}, table_bytes={"law": 1, "bio": 1})
    own = profile_of(asked=asked, quiet=quiet, huge=backbone(8.0, layer_mb=20))
    drawn = random_trace({"asked/law": 20.0, "asked/bio": 0.0, "quiet/law": 0.0, "huge/law": 0.0}, 10.0)
    problem = Problem(cluster_of(2, 40), own, units_of(own), drawn.with_timeouts(8 * alone_ns(own, drawn)))
    best = search(problem, allows=lambda one: one.stages == 1)[0]
    placed = [(set(group.cuts), set(group.units)) for group in best.groups]
    assert ({"asked"}, {"asked/law", "asked/bio"}) in placed and ({"quiet"}, {"quiet/law"}) in placed
    assert not any("huge" in group.cuts for group in best.groups)  # 80 MB


def test_a_unit_that_the_sample_lost_is_placed():
    problem = problem_of(2.0, 2.0, devices=4, memory_mb=200, rate=200.0, seconds=60.0)
    few = np.where(np.arange(len(problem.trace)) == 3000, 1, 0)
    problem = problem.on(replace(problem.trace, unit=few))
    assert not problem.trace.sampled(160).counts[1]
    assert search(problem, sample=160)[0].attained.by_unit["b1/law"] == 1


def test_all_ways_to_cut_that_layers_and_times_allow_are_tried():
    found = parallels(problem_of(8.0, devices=8))
    assert set(found) == {Parallel(*own) for own in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))}  # 4 layers
    assert set(parallels(problem_of(8.0, devices=8), lambda one: one.stages == 1)) == {Parallel(1, 1), Parallel(1, 2)}
