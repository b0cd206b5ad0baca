"""Requests to a cluster of the benchmark, and the replicas that get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.cluster_material import Material
from loadtest.generator import Load
from loadtest.load import Report, send
from loadtest.server import ServedCluster

ASKED = 10  # requests by which a tenant's replica is found


def sent(address: str, load: Load) -> Report:
    """Sends a load, which names no address, to one."""
    host, _, port = address.rpartition(":")
    return send(replace(load, host=host, port=int(port)))[0]


def requests_of(cluster: ServedCluster) -> dict[str, int]:
    """Returns how many requests each replica has had through the router."""
    return {name: own["requests"] for name, own in cluster.status().items()}


def placed(cluster: ServedCluster, material: Material, tenants: Sequence[str]) -> dict[str, list[str]]:
    """Returns the tenants that the router sends to each replica while there is no other load."""
    own: dict[str, list[str]] = {name: [] for name in cluster.replicas}
    for tenant in tenants:
        before = requests_of(cluster)
        sent(cluster.address, Load("", 0, [material.request(0, tenant)], count=ASKED))
        counts = {name: count - before[name] for name, count in requests_of(cluster).items()}
        own[max(counts, key=counts.__getitem__)].append(tenant)
    return own
