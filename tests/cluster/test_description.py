"""cluster.json: what is read, and what is refused with the thing that is wrong."""

import json

import pytest

from hplm.cluster.description import ClusterDescription, Replica, is_address
from hplm.errors import InvalidInput
from tests.support.message import mentioning

ONE = {"id": 1, "name": "one", "http": "10.0.0.1:8000", "grpc": "10.0.0.1:8001"}
TWO = {"id": 2, "name": "two", "http": "hplm-1.hplm:8000", "grpc": "hplm-1.hplm:8001"}
POOL = {"name": "all", "repository": "model_repository", "replicas": [ONE, TWO]}
OTHER = {"name": "other", "repository": "/other", "replicas": [{**ONE, "name": "three", "http": "[::1]:1", "grpc": "[::1]:2"}]}


@pytest.fixture
def read(tmp_path):
    def read(**fields):
        file = tmp_path / "cluster.json"
        file.write_text(json.dumps({"kind": "hplm replicas", "format": 1, **fields}))
        return ClusterDescription.read(file)

    return read


def test_paths_begin_at_the_file_and_a_pool_may_have_its_own_state(read, tmp_path):
    pools = read(pools=[{**POOL, "tenants": ["acme"]}, {**OTHER, "state": "own"}], state="state").pools
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
