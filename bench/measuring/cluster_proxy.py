"""Measures what the router costs: the throughput of two replicas through it and without it, and the time of its hop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.measuring.cluster_material import Material, say
from loadtest.generator import run_apart
from loadtest.report import Load, Report
from loadtest.served_cluster import ServedCluster

WARMING_SHARE = 0.25  # of a measurement's seconds


def proxy_figures(cluster: ServedCluster, material: Material) -> dict[str, float]:
    """Turns of both ways follow each other, because machines drift."""
    case = material.case
    few = material.tenants[: max(2, case.slots // 2)]  # a batch may use half of the slots
    requests = [material.request(number, few[number % len(few)]) for number in range(8 * len(few))]
    direct_to, through = list(cluster.replicas.values()), [cluster.address] * len(cluster.replicas)
    rates: dict[str, list[float]] = {"direct": [], "through": []}
    hops: list[float] = []
    for turn in range(case.rounds):
        say(f"the router beside none, round {turn + 1} of {case.rounds}")
        for way, addresses in (("direct", direct_to), ("through", through)):
            _together(addresses, requests, case.connections, WARMING_SHARE * case.seconds)
            rates[way].append(
                sum(report.req_per_s for report in _together(addresses, requests, case.connections, case.seconds))
            )
        alone = requests[:1]
        direct, by_router = (
            _together([address], alone, 1, case.seconds / 2)[0].percentile_ms(50) for address in (direct_to[0], cluster.address)
        )
        hops.append(by_router - direct)
    direct_rate, through_rate = (float(np.median(rates[way])) for way in ("direct", "through"))
    return {
        "proxy_over_direct": round(through_rate / direct_rate, 3),
        "direct_req_per_s": round(direct_rate, 1),
        "through_req_per_s": round(through_rate, 1),
        "hop_p50_ms": round(float(np.median(hops)), 3),
    }


def _together(addresses: Sequence[str], requests: Sequence[bytes], connections: int, seconds: float) -> list[Report]:
    """Sends from one generator to each address at the same time, with the connections divided among them."""
    loads = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        each = max(1, connections // len(addresses))
        loads.append(Load(host, int(port), requests, seconds=seconds, connections=each))
    with ThreadPoolExecutor(len(loads)) as pool:
        reports = list(pool.map(run_apart, loads))
    for report in reports:
        report.expect_success("the router beside none")
    return reports
