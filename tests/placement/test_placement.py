"""Units, their memory with what they share, and what a placement may not do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hplm.errors import InvalidInput
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit, machine_bytes, stages_bytes, unit_names, units_of
from tests.placement.profiles import MB, backbone_profile, cluster_of, profile_of
from tests.support.message import refusing

PROFILE = profile_of()
UNITS = units_of(PROFILE)
WHOLE = {"bert": ((0, 2),)}


def group(name="one", machine="m0", devices=("cpu:0",), intra=1, cuts=WHOLE, units=("bert/law",)):
    return Group(name, machine, devices, intra, cuts, units)


def placed(*groups, cluster=None, profile=PROFILE):
    return Placement.of(groups, units_of(profile), cluster or cluster_of(), profile)


def test_units_are_the_tenants_of_a_domain_and_hot_tenants():
    assert units_of(PROFILE) == (Unit("bert/root", 1), Unit("bert/law", 2))
    hot = units_of(PROFILE, ["bert/a", "bert/c"])
    assert hot == (Unit("bert/root/c", 1), Unit("bert/law/a", 1), Unit("bert/law", 1))
    assert (hot[1].backbone, hot[1].domain, hot[1].tenant, hot[2].tenant) == ("bert", "law", "a", None)
    assert unit_names(PROFILE, hot) == {
        ("bert", "a"): "bert/law/a",
        ("bert", "b"): "bert/law",
        ("bert", "c"): "bert/root/c",
    }
    with refusing(InvalidInput, "'bert/nobody'"):
        units_of(PROFILE, ["bert/nobody"])


def test_tables_are_counted_once_with_those_that_they_fall_back_to():
    root, law = UNITS
    assert machine_bytes(PROFILE, [root]) == 100 * MB + MB
    assert machine_bytes(PROFILE, [law]) == 120 * MB + 2 * MB
    assert machine_bytes(PROFILE, [root, law, law]) == 120 * MB + 3 * MB
    assert machine_bytes(PROFILE, []) == 0


TWO = cluster_of(machines=2)
ELSEWHERE = tuple(replace(device, name=f"cpu:{8 + i}") for i, device in enumerate(TWO.machines[1].devices))
OVER_TWO = replace(TWO, machines=(TWO.machines[0], replace(TWO.machines[1], devices=ELSEWHERE)))
OTHER = profile_of(bert=backbone_profile([1e6] * 3))


@pytest.mark.parametrize(
    "groups, given, named",
    [
        ((group(), group("two")), {}, ["'one'", "'two'", "'cpu:0'"]),
        ((group(devices=("cpu:0", "cpu:0"), intra=2),), {}, ["'cpu:0'", "once"]),
        ((group(devices=("cpu:5",)),), {}, ["'one'", "'cpu:5'", "'m0'"]),
        ((group(machine="m7"),), {}, ["'one'", "'m7'"]),
        ((group(),), {"cluster": cluster_of(memory_mb=50)}, ["'one'", "bert", "61,000,000", "50,000,000", "cpu:0"]),
        ((group(),), {"cluster": cluster_of(tables_mb=50)}, ["'m0'", "122,000,000", "50,000,000"]),
        ((group(cuts={"bert": ((0, 1),)}),), {}, ["'one'", "'bert'", "3"]),
        ((group(cuts={**WHOLE, "mini": ((0, 1),)}),), {}, ["'one'", "'mini'", "profile"]),
        ((group(devices=("cpu:0", "cpu:9"), intra=2),), {"cluster": OVER_TWO},
         ["'cpu:9'", "'m0'", "'m1'", "one machine"]),
        ((group(),), {"units": (*UNITS, Unit("bert/art", 1))}, ["'bert/art'", "profile"]),
        ((group(),), {"units": (*UNITS, Unit("mini/law", 1))}, ["'mini/law'", "profile"]),
        ((group(),), {"units": (*UNITS, Unit("bert/law/z", 1))}, ["'bert/z'", "profile"]),
        ((group(),), {"units": (UNITS[0], Unit("bert/law", 7))}, ["'bert/law'", "profile"]),
        ((group(),), {"now": (cluster_of(4), PROFILE)}, ["stale", "cluster", "hplm place search"]),
        ((group(),), {"now": (cluster_of(), OTHER)}, ["stale", "profile", "hplm place search"]),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_fit_the_cluster_and_the_profile_is_refused(groups, given, named):
    cluster = given.get("cluster", cluster_of())
    placement = replace(placed(*groups, cluster=cluster), units=given.get("units", UNITS))
    with refusing(InvalidInput, *named):
        placement.check(*given.get("now", (cluster, PROFILE)))


def test_layers_and_slots_are_counted_once_a_stage_whatever_the_units():
    both = profile_of(bert=backbone_profile(), mini=backbone_profile([1e6, 1e6], layer_mb=1))
    cuts = {"bert": ((0, 0), (1, 2)), "mini": ((0, 0), (1, 1))}
    assert stages_bytes(both, cuts) == [(10 + 10 + 1) * MB + (1 + 15 + 1) * MB, (20 + 20) * MB + (1 + 15) * MB]


def test_units_that_no_group_serves_are_known():
    assert placed(group()).unplaced == (Unit("bert/root", 1),)
    assert not placed(group(units=("bert/law", "bert/root"))).unplaced
