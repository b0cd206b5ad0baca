"""Cores are divided among replicas."""

import os
from pathlib import Path

import pytest

from hplm.cluster.pools import divided, placed_pools, replicas_of
from hplm.errors import InvalidInput
from hplm.placement.placement import Group

HERE = Path("repository")
MINE = tuple(sorted(os.sched_getaffinity(0)))


def test_each_replica_gets_as_many_cores():
    assert divided((0, 1, 2, 3), 2) == [(0, 1), (2, 3)] and divided((0, 1, 2), 2) == [(0,), (1, 2)]
    found = [(replica.id, replica.name, replica.cores) for replica in (*replicas_of(HERE, 2), *replicas_of(HERE, 1, MINE))]
    assert found == [(1, "replica-1", ()), (2, "replica-2", ()), (1, "replica-1", MINE)]


def group(name, *units, devices=("cuda:0",), machine="here"):
    return Group(name, machine, devices, 1, {"toy": ((0, 1),)}, units)


def test_groups_with_the_same_units_are_replicas_of_a_pool(tmp_path):
    groups = [group("A", "toy/a", "toy/b", devices=(f"cpu:{MINE[-1]}",)), group("C", "toy/c"), group("B", "toy/b", "toy/a")]
    repositories = {name: tmp_path / name for name in "ABC"}
    first, second = placed_pools(groups, repositories)
    assert (first.name, first.repository) == ("a", tmp_path / "A")
    assert [(replica.id, replica.repository.name, replica.cores) for replica in first.replicas] == [
        (1, "A", MINE[-1:]),
        (2, "B", ()),
    ]
    assert second.name == "c" and [replica.id for replica in second.replicas] == [3]


@pytest.mark.parametrize(
    "count, cores, what",
    [(len(MINE) + 1, MINE, f"{len(MINE)} cores for"), (2, MINE[:1] * 2, "twice")],  # more are in test_running
)
def test_what_cannot_be_divided_is_refused(count, cores, what):
    with pytest.raises(InvalidInput, match=what):
        replicas_of(HERE, count, cores)


@pytest.mark.parametrize(
    "groups, what",
    [
        ([group("one", "toy/a", "toy/b"), group("two", "toy/b")], "'one' and 'two' both have unit 'toy/b'"),
        ([group("one", "toy/a", devices=("cpu:99999",))], "core 99999"),
        ([group("one", "toy/a"), group("two", "toy/b", machine="there")], "here, there.*hplm place emit"),
    ],
)
def test_groups_that_are_no_pools_are_refused(tmp_path, groups, what):
    with pytest.raises(InvalidInput, match=what):
        placed_pools(groups, dict.fromkeys(("one", "two"), tmp_path))
