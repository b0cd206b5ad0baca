"""Measures what the router costs: the throughput of two replicas through it and without it, and the time of its hop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.cluster_material import Material, say
from bench.cluster_traffic import placed, sent
from loadtest.generator import Load
from loadtest.load import Report
from loadtest.server import ServedCluster

WARMING_SHARE = 0.25  # of a measurement's seconds


def proxy_figures(cluster: ServedCluster, material: Material) -> dict[str, float]:
    """Turns of both ways follow each other, because machines drift.

    Without the router, each replica gets the tenants that the router sends it: with fewer tenants a batch has fewer adapters.
    """
    case = material.case
    few = placed(cluster, material, material.tenants[: max(2, case.slots // 2)])  # a batch may use half of the slots
    own = {cluster.replicas[name]: _requests(material, tenants) for name, tenants in few.items() if tenants}
    requests = [request for some in own.values() for request in some]
    direct_to, through = list(own.items()), [(cluster.address, requests)] * len(own)
    rates: dict[str, list[float]] = {"direct": [], "through": []}
    hops: list[float] = []
    for turn in range(case.rounds):
        say(f"the router beside none, round {turn + 1} of {case.rounds}")
        for way, asked in (("direct", direct_to), ("through", through)):
            _together(asked, case.connections, WARMING_SHARE * case.seconds)
            rates[way].append(sum(report.req_per_s for report in _together(asked, case.connections, case.seconds)))
        first, alone = direct_to[0][0], direct_to[0][1][:1]
        direct, by_router = (
            _together([(address, alone)], 1, case.seconds / 2)[0].percentile_ms(50) for address in (first, cluster.address)
        )
        hops.append(by_router - direct)
    direct_rate, through_rate = (float(np.median(rates[way])) for way in ("direct", "through"))
    return {
        "proxy_over_direct": round(through_rate / direct_rate, 3),
        "direct_req_per_s": round(direct_rate, 1),
        "through_req_per_s": round(through_rate, 1),
        "hop_p50_ms": round(float(np.median(hops)), 3),
    }


def _requests(material: Material, tenants: Sequence[str]) -> list[bytes]:
    return [material.request(number, tenants[number % len(tenants)]) for number in range(8 * len(tenants))]


def _together(asked: Sequence[tuple[str, Sequence[bytes]]], connections: int, seconds: float) -> list[Report]:
    """Sends requests to several addresses at the same time, with the connections divided among them."""
    each = max(1, connections // len(asked))
    with ThreadPoolExecutor(len(asked)) as pool:
        loads = [(address, Load("", 0, requests, seconds=seconds, connections=each)) for address, requests in asked]
        reports = list(pool.map(lambda one: sent(*one), loads))
    for report in reports:
        report.expect_success("the router beside none")
    return reports
