"""Which pool and which homes a tenant has."""

from pathlib import Path

import pytest

from hplm.cluster.description import ClusterDescription, Pool, Replica
from hplm.cluster.routes import homes_of, routes_of
from tests.cluster.router import tenant
from tests.support.message import mentions


def pool(name, replicas=3, tenants=None):
    return Pool(
        name,
        Path(name),
        tuple(Replica(number, f"{name}-{number}", "h:1", "h:2") for number in range(1, replicas + 1)),
        tenants=frozenset(tenants) if tenants is not None else None,
    )


def routed(pools, **served):
    return routes_of(ClusterDescription(tuple(pools)), served)


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
