"""`hplm bench cluster`: two servers behind HAProxy on this machine, beside the same servers without it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from bench.cluster_changes import Material, change_figures, kill_figures, revoke_figures
from bench.rows import Positive, Rows, Size, Whole, benchmark, rows_of, say
from hplm.errors import HplmError
from loadtest.generator import Load
from loadtest.load import Report, send
from loadtest.server import ServedCluster

TARGETS = {
    "proxy_over_direct": (">=", 0.95),
    "hop_p50_ms": ("<=", 0.5),
    "kill_unanswered": ("<=", 0),
    "kill_wrong": ("<=", 0),
    "reroute_s": ("<=", 2.0),
    "add_p99_s": ("<=", 1.0),
    "after_delete": ("<=", 0),
    "revoke_s": ("<=", 1.0),
}
WARMING_SHARE = 0.25  # of a measurement's seconds
ASKED = 10  # requests by which a tenant's replica is found

Asked = Mapping[str, Sequence[bytes]]  # requests by address
Part = Literal["proxy", "changes", "revoke", "faults"]


@benchmark(
    size="toy", tokens=16, slots=4, connections=8, seconds=0.5, rounds=1, adds=2, table_mb=1.0,
    only=("proxy", "changes", "revoke"),
)  # fmt: skip
def cluster(
    *,
    size: Size = "minilm",
    tokens: Whole = 32,
    slots: Whole = 16,
    connections: Whole = 64,
    seconds: Positive = 15.0,
    rounds: Whole = 3,
    adds: Whole = 20,
    table_mb: Positive = 2000.0,
    only: tuple[Part, ...] = get_args(Part),
) -> Rows:
    """Runs `hplm cluster up` with two servers on this machine.

    Measures what the router costs, what clients see when a server is killed, and how soon changes of tenants are everywhere.
    Needs haproxy, and two cores.

    :param size: of the model
    :param tokens: of a text
    :param slots: of a server; there are four times as many tenants
    :param connections: of the clients
    :param seconds: of each timed measurement
    :param rounds: turns of each comparison
    :param adds: tenants that come and go
    :param table_mb: of the table that is published before a key is revoked
    :param only: these parts
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise HplmError("this machine has one core, but each of two servers needs its own: use another machine")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:  # a short path, for sockets
        say("making a repository")
        material = Material.made(Path(folder), size, tokens, slots)
        parts: dict[Part, Callable[[ServedCluster], dict[str, Any]]] = {
            "proxy": lambda servers: proxy_figures(servers, material, max(2, slots // 2), connections, seconds, rounds),
            "changes": lambda servers: change_figures(servers, material, adds),
            "revoke": lambda servers: revoke_figures(servers, material, table_mb),
            "faults": lambda servers: kill_figures(servers, material),
        }
        with ServedCluster(material.repository, Path(folder) / "2", 2, cores) as servers:
            for part in parts:
                figures |= parts[part](servers) if part in only else {}
    yield from rows_of(figures, TARGETS)


def proxy_figures(
    cluster: ServedCluster, material: Material, tenants: int, connections: int, seconds: float, rounds: int
) -> dict[str, float]:
    """Turns of both ways follow each other, because machines drift.

    Without the router, each replica gets the tenants that the router sends it: with fewer tenants a batch has fewer adapters.
    """
    placed = _placed(cluster, material, material.tenants[:tenants])  # a batch may use half of the slots
    direct = {
        cluster.replicas[name]: [material.request(number, own[number % len(own)]) for number in range(8 * len(own))]
        for name, own in placed.items()
        if own
    }
    ways: dict[str, Asked] = {
        "direct": direct,
        "through": {cluster.address: [request for own in direct.values() for request in own]},
    }
    (first, own), *_ = direct.items()
    rates: dict[str, list[float]] = {way: [] for way in ways}
    hops: list[float] = []
    for turn in range(rounds):
        say(f"the router beside none, round {turn + 1} of {rounds}")
        for way, asked in ways.items():
            _together(asked, connections, WARMING_SHARE * seconds)
            rates[way].append(sum(report.req_per_s for report in _together(asked, connections, seconds)))
        without, by_router = (
            _together({address: own[:1]}, 1, seconds / 2)[0].percentile_ms(50) for address in (first, cluster.address)
        )
        hops.append(by_router - without)
    direct_rate, through_rate = (float(np.median(rates[way])) for way in ways)
    return {
        "proxy_over_direct": round(through_rate / direct_rate, 3),
        "direct_req_per_s": round(direct_rate, 1),
        "through_req_per_s": round(through_rate, 1),
        "hop_p50_ms": round(float(np.median(hops)), 3),
    }


def _together(asked: Asked, connections: int, seconds: float) -> list[Report]:
    """Sends requests to several addresses at the same time, with the connections divided among them."""
    each = max(1, connections // len(asked))
    reports = send(*(Load(to, requests, seconds=seconds, connections=each) for to, requests in asked.items()))
    for report in reports:
        report.expect_success("requests to the cluster")
    return reports


def _placed(cluster: ServedCluster, material: Material, tenants: Sequence[str]) -> dict[str, list[str]]:
    """Returns the tenants that the router sends to each replica while there is no other load."""
    own: dict[str, list[str]] = {name: [] for name in cluster.replicas}
    for tenant in tenants:
        before = _requests_of(cluster)
        send(Load(cluster.address, [material.request(0, tenant)], count=ASKED))
        counts = {name: count - before[name] for name, count in _requests_of(cluster).items()}
        own[max(counts, key=counts.__getitem__)].append(tenant)
    return own


def _requests_of(cluster: ServedCluster) -> dict[str, int]:
    """Returns how many requests each replica has had through the router."""
    return {name: own["requests"] for name, own in cluster.status().items()}
