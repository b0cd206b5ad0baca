"""Pools: cluster.json that describes them, which one and which homes a tenant has, and those of a cluster on this machine."""

import json
import os
from pathlib import Path

import pytest

from hplm.cluster.description import Pool, Replica, is_address, read_pools
from hplm.cluster.pools import divided, one_pool, placed_pools
from hplm.cluster.routes import homes_of, routes_of
from hplm.errors import InvalidInput
from hplm.placement.placement import Group
from tests.cluster.router import tenant
from tests.support.message import mentioning, mentions

ONE = {"id": 1, "name": "one", "http": "10.0.0.1:8000", "grpc": "10.0.0.1:8001"}
TWO = {"id": 2, "name": "two", "http": "hplm-1.hplm:8000", "grpc": "hplm-1.hplm:8001"}
POOL = {"name": "all", "repository": "model_repository", "replicas": [ONE, TWO]}
OTHER = {"name": "other", "repository": "/other", "replicas": [{**ONE, "name": "three", "http": "[::1]:1", "grpc": "[::1]:2"}]}
HERE = Path("repository")
MINE = tuple(sorted(os.sched_getaffinity(0)))  # cores


@pytest.fixture
def read(tmp_path):
    def read(**fields):
        file = tmp_path / "cluster.json"
        file.write_text(json.dumps({"kind": "hplm replicas", "format": 1, **fields}))
        return read_pools(file)

    return read


def test_paths_begin_at_the_file_and_a_pool_may_have_its_own_state(read, tmp_path):
    pools = read(pools=[{**POOL, "tenants": ["acme"]}, {**OTHER, "state": "own"}], state="state")
    assert pools[0].repository == tmp_path / "model_repository" and str(pools[1].repository) == "/other"
    assert [pool.state for pool in pools] == [tmp_path / "state", tmp_path / "own"]
    assert [pool.tenants for pool in pools] == [{"acme"}, None]
    assert pools[0].replicas == (Replica(**ONE), Replica(**TWO))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pools": []}, ["pools"]),
        ({"pools": [POOL], "replicas": 3}, ["'replicas'"]),
        ({"pools": [{**POOL, "replicas": []}]}, ["pools[0].replicas"]),
        ({"pools": [{**POOL, "weight": 1}]}, ["pools[0]", "'weight'"]),
        ({"pools": [{**POOL, "replicas": [{**ONE, "port": 1}]}]}, ["replicas[0]", "'port'"]),
        ({"pools": [{**POOL, "replicas": [ONE, {**TWO, "id": 1}]}]}, ["'all'", "id", "1"]),
        ({"pools": [{**POOL, "replicas": [ONE, {**TWO, "name": "one"}]}]}, ["name", "'one'"]),
        ({"pools": [{**POOL, "replicas": [ONE, {**TWO, "http": ONE["http"]}]}]}, ["http", "'10.0.0.1:8000'"]),
        ({"pools": [POOL, {**OTHER, "replicas": [{**TWO, "name": "three"}]}]}, ["http", "'hplm-1.hplm:8000'"]),
        ({"pools": [POOL, {**OTHER, "name": "all"}]}, ["pools", "'all'"]),
        ({"pools": [{**POOL, "name": "All Of Them"}]}, ["pools[0].name"]),
        ({"pools": [{**POOL, "name": "all\n"}]}, ["pools[0].name"]),
        ({"pools": [{**POOL, "replicas": [{**ONE, "id": 0}]}]}, ["replicas[0].id"]),
        ({"pools": [{**POOL, "replicas": [{**ONE, "grpc": "10.0.0.1"}]}]}, ["replicas[0]", "10.0.0.1", "HOST:PORT"]),
        ({"kind": "hplm cluster", "pools": [POOL]}, ["hplm cluster"]),
    ],
)
def test_a_wrong_description_names_the_thing(read, fields, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        read(**fields)


@pytest.mark.parametrize(
    ("addresses", "right"),
    [
        ("localhost:1|10.0.0.1:65535|a-b.c_d:80|[::1]:8000|[fe80::1]:1", True),
        ("|:80|host|host:|host:0|host:65536|host:8a|::1:80|http://host:80|a b:80|host:80 check|a/b:1", False),
    ],
)
def test_addresses(addresses, right):
    assert [address for address in addresses.split("|") if is_address(address) != right] == []


def pool(name, replicas=3, tenants=None):
    return Pool(
        name,
        Path(name),
        tuple(Replica(number, f"{name}-{number}", "h:1", "h:2") for number in range(1, replicas + 1)),
        tenants=frozenset(tenants) if tenants is not None else None,
    )


def routed(pools, **served):
    return routes_of(pools, served)


def test_tenants_of_the_first_pool_without_quotas_need_no_entry():
    routes = routed([pool("a"), pool("b")], a=[tenant("one")], b=[tenant("two"), tenant("three", deadline_us=7)])
    assert (routes.pools, routes.homes) == ({"two": "b", "three": "b"}, {})
    assert not routes.conflicts and not routes.notes


@pytest.mark.parametrize("quota", ["rate", "texts_rate", "tokens_rate", "in_flight"])
def test_each_quota_gives_a_tenant_homes(quota):
    for homes in (1, 2, 3):
        entry = routed([pool("a")], a=[tenant("one", homes=homes, **{quota: 4})]).homes["one"]
        count, *ids = map(int, entry.split("/"))
        assert count == homes and ids == homes_of("one", pool("a"))


def test_more_homes_than_replicas_are_said():
    routes = routed([pool("a", 2)], a=[tenant("one", rate=4.0, homes=3)])
    assert mentions(routes.notes, "'one'", 3, 2)


def test_of_two_backbones_with_one_name_the_fewest_homes_count():
    """With more, the replicas would admit more than one of the tenants allows."""
    both = [tenant("one", rate=4.0, homes=3), tenant("one", rate=4.0, homes=2), tenant("one", homes=1)]
    assert routed([pool("a")], a=both).homes["one"].split("/")[0] == "2"


def test_a_tenant_of_two_pools_is_a_conflict_unless_one_of_them_names_it():
    both = {"a": [tenant("one"), tenant("two")], "b": [tenant("one"), tenant("two")]}
    routes = routed([pool("a"), pool("b")], **both)
    assert len(routes.conflicts) == 2 and all("'a'" in line and "'b'" in line for line in routes.conflicts)
    assert not routes.pools, "the first pool answers"
    routes = routed([pool("a"), pool("b", tenants=["one"])], **both)
    assert routes.pools == {"one": "b"} and not routes.conflicts, "a canary"
    routes = routed([pool("a", tenants=[]), pool("b")], **both)
    assert routes.pools == {"one": "b", "two": "b"} and not routes.conflicts, "all but the machines have moved"


def test_a_tenant_that_no_pool_takes_is_a_conflict():
    routes = routed([pool("a", tenants=["one"])], a=[tenant("one"), tenant("two")])
    assert len(routes.conflicts) == 1 and "'two'" in routes.conflicts[0]


def test_each_replica_gets_as_many_cores():
    assert divided((0, 1, 2, 3), 2) == [(0, 1), (2, 3)] and divided((0, 1, 2), 2) == [(0,), (1, 2)]
    found = [(replica.id, replica.name, replica.cores) for replica in (*one_pool(HERE, 2), *one_pool(HERE, 1, MINE))]
    assert found == [(1, "replica-1", ()), (2, "replica-2", ()), (1, "replica-1", MINE)]


def group(name, *units, devices=("cuda:0",), machine="here"):
    return Group(name, machine, devices, 1, {"toy": ((0, 1),)}, units)


def test_groups_with_the_same_units_are_replicas_of_a_pool(tmp_path):
    groups = [group("A", "toy/a", "toy/b", devices=(f"cpu:{MINE[-1]}",)), group("C", "toy/c"), group("B", "toy/b", "toy/a")]
    found = [[(own.id, own.pool, own.repository, own.cores) for own in pool] for pool in placed_pools(groups, tmp_path)]
    assert found == [[(1, "a", tmp_path / "A", MINE[-1:]), (2, "a", tmp_path / "B", ())], [(3, "c", tmp_path / "C", ())]]


@pytest.mark.parametrize(
    "count, cores, what",
    [(len(MINE) + 1, MINE, f"{len(MINE)} cores for"), (2, MINE[:1] * 2, "twice")],  # more are in test_running
)
def test_what_cannot_be_divided_is_refused(count, cores, what):
    with pytest.raises(InvalidInput, match=what):
        one_pool(HERE, count, cores)


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
        placed_pools(groups, tmp_path)
