"""`hplm bench cluster`: several servers behind HAProxy on this machine, beside one server and round robin."""

from __future__ import annotations

import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.cluster_changes import Material, change_figures, kill_figures, revoke_figures, roll_figures
from bench.rows import Positive, Rows, Size, Whole, benchmark, rows_of, say
from hplm.errors import HplmError
from loadtest.generator import Load
from loadtest.load import Report, send
from loadtest.server import ServedCluster
from loadtest.watch import PUBLISHED_AFTER
from testing.random_trace import power_law

TARGETS = {
    "proxy_over_direct": (">=", 0.95),
    "hop_p50_ms": ("<=", 0.5),
    "hash_over_round_robin": ("<=", 0.5),
    "busiest_over_mean": ("<=", 1.3),
    "kill_unanswered": ("<=", 0),
    "kill_wrong": ("<=", 0),
    "reroute_s": ("<=", 2.0),
    "roll_failures": ("<=", 0),
    "add_p99_s": ("<=", 1.0),
    "after_delete": ("<=", 0),
    "revoke_s": ("<=", 1.0),
    "limit_ratio": ("<=", 1.05),
    "limit_least": (">=", 0.9),  # else the limit was not reached
}
WARMING_SHARE = 0.25  # of a measurement's seconds
ASKED = 10  # requests by which a tenant's replica is found
REQUESTS = 4096  # different ones
RATE, TIMES_THE_LIMIT = 50.0, 3  # requests a second that a tenant may send, and how many times as many it sends
BURST_S = 0.1  # of the rate: what may come at once, so that a pause of the machine costs little of the limit
MISSES = re.compile(r"^hplm_slot_misses_total\{.*\} (\S+)$", re.MULTILINE)

Asked = Mapping[str, Sequence[bytes]]  # requests by address
Part = Literal["proxy", "faults", "changes", "revoke", "spread", "limits"]


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
    only: tuple[Part, ...] = ("proxy", "faults", "changes", "revoke", "spread", "limits"),
) -> Rows:
    """Runs `hplm cluster up` with two and with three servers on this machine.

    Measures what the router costs, how it spreads tenants, what clients see when a server is killed and when all are replaced,
    how soon changes of tenants are everywhere, and whether limits hold. Needs haproxy, and two cores.

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
        with_two = {
            "proxy": lambda servers: proxy_figures(servers, material, max(2, slots // 2), connections, seconds, rounds),
            "changes": lambda servers: change_figures(servers, material, adds),
            "revoke": lambda servers: revoke_figures(servers, material, table_mb),
            "faults": lambda servers: kill_figures(servers, material) | roll_figures(servers, material),
        }
        with_three = {
            "spread": lambda servers: spread_figures(servers, material, connections, seconds, rounds),
            "limits": lambda servers: limit_figures(servers, material, connections, seconds),
        }
        for count, parts, on in ((2, with_two, cores), (3, with_three, ())):
            if wanted := [part for part in parts if part in only]:
                say(f"{count} servers")
                with ServedCluster(material.repository, Path(folder) / str(count), count, on) as servers:
                    for part in wanted:
                        figures |= parts[part](servers)
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


def spread_figures(
    cluster: ServedCluster, material: Material, connections: int, seconds: float, rounds: int
) -> dict[str, float]:
    """The same requests go through the router, and to the replicas in turn. Tenants follow Zipf's law."""
    share = power_law(len(material.tenants), 1.0)
    chosen = np.random.default_rng(3).choice(len(material.tenants), REQUESTS, p=share)
    requests = [material.request(number, material.tenants[tenant]) for number, tenant in enumerate(chosen.tolist())]
    replicas = list(cluster.replicas.values())
    in_turn = {address: requests[number :: len(replicas)] for number, address in enumerate(replicas)}

    def brought(asked: Asked) -> float:
        """Returns the adapters and heads brought to a device, for each request."""
        _together(asked, connections, WARMING_SHARE * seconds)
        before = _misses(cluster)
        answered = sum(report.succeeded for report in _together(asked, connections, seconds))
        return (_misses(cluster) - before) / answered

    hashed, turned, busiest = [], [], []
    for turn in range(rounds):
        say(f"tenants on replicas, round {turn + 1} of {rounds}")
        before = _requests_of(cluster)
        hashed.append(brought({cluster.address: requests}))
        counts = np.array([count - before[name] for name, count in _requests_of(cluster).items()])
        busiest.append(float(counts.max() / counts.mean()))
        turned.append(brought(in_turn))
    return {
        "hash_over_round_robin": round(float(np.median(hashed) / np.median(turned)), 3),
        "busiest_over_mean": round(float(np.median(busiest)), 3),
    }


def limit_figures(cluster: ServedCluster, material: Material, connections: int, seconds: float) -> dict[str, float]:
    """Sends several times what a tenant may send, to a tenant with one home and to one whose limit all replicas share."""
    manager = cluster.manager()
    figures: dict[str, float] = {}
    for homes, tenant in ((1, material.tenants[0]), (len(cluster.replicas), material.tenants[1])):
        say(f"a limit of {RATE:g} requests a second over {homes} of {len(cluster.replicas)} replicas")
        manager.limit(tenant, rate=RATE, burst=BURST_S * RATE, homes=homes)
        manager.settle_now()
        time.sleep(PUBLISHED_AFTER)  # for the router, which follows too
        load = {"seconds": seconds, "rate": TIMES_THE_LIMIT * RATE, "connections": connections}
        (report,) = send(Load(cluster.address, [material.request(0, tenant)], **load))
        figures[f"limit_ratio_{homes}_homes"] = round(report.succeeded / (RATE * seconds), 3)
    return {"limit_ratio": max(figures.values()), "limit_least": min(figures.values()), **figures}


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


def _misses(cluster: ServedCluster) -> float:
    time.sleep(PUBLISHED_AFTER)
    total = 0.0
    for address in cluster.metrics.values():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            total += sum(map(float, MISSES.findall(answer.read().decode())))
    return total
