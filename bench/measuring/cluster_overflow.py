"""Measures what the bound of the router's hashing costs: requests that a full replica passes on bring adapters elsewhere.

The router is real, and the replicas are stand-ins with slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.measuring.cluster_material import Material, say
from bench.measuring.cluster_spread import in_turn
from bench.measuring.cluster_stand_ins import StandIn, places, routed
from bench.measuring.cluster_traffic import sent
from hplm.placement.workload import power_law
from hplm.server.ports import LOOPBACK
from loadtest.load import Load

REPLICAS = 3
FACTORS = (125, 150, 200, 0)  # percent of the mean of requests in flight that a replica may have; 0: any
FEW = 6  # connections, two a replica
WORK_S = 0.004  # of a request: so much that neither HAProxy nor the clients are what all wait for
REQUESTS = 4096  # different ones


@dataclass(frozen=True)
class Spread:
    brought: float  # adapters, for each request
    passed_on: float  # share of the requests that another replica than the tenant's own has answered
    busiest: float  # requests of the busiest replica over the mean


def overflow_figures(folder: Path, material: Material) -> dict[str, float]:
    """Tenants follow Zipf's law, and each connection sends its next request when it has an answer."""
    figures: dict[str, float] = {}
    for connections in (FEW, material.case.connections):
        say(f"requests that full replicas pass on, {connections} connections")
        turns = _spread(folder / f"turns-{connections}", material, in_turn, connections)
        for factor in FACTORS:
            own = _spread(folder / f"{factor}-{connections}", material, partial(_bounded, factor), connections)
            of = f"of_{connections}_at_{factor}"
            figures[f"brought_over_turns_{of}"] = round(own.brought / turns.brought, 3)
            figures[f"passed_on_{of}"] = round(own.passed_on, 3)
            figures[f"busiest_over_mean_{of}"] = round(own.busiest, 3)
    return figures


def _bounded(factor: int, config: str) -> str:
    """Returns HAProxy's file with another bound."""
    return re.sub(r"hash-balance-factor \d+", f"hash-balance-factor {factor}", config)


def _spread(folder: Path, material: Material, change: Callable[[str], str], connections: int) -> Spread:
    case = material.case
    replicas = [StandIn(f"replica-{number}", case.slots, WORK_S) for number in range(1, REPLICAS + 1)]
    chosen = np.random.default_rng(3).choice(len(material.tenants), REQUESTS, p=power_law(len(material.tenants), 1.0))
    requests = [material.request(number, material.tenants[tenant]) for number, tenant in enumerate(chosen.tolist())]
    with routed(folder, material, replicas, change) as port:
        home = places(port, material.backbone, material.tenants)
        before = [(one.brought, one.tenants.copy()) for one in replicas]
        report = sent(f"{LOOPBACK}:{port}", Load("", 0, requests, seconds=case.seconds / 4, connections=connections))
        report.expect_success("tenants on stand-ins")
        taken = {one.name: one.tenants - was for one, (_, was) in zip(replicas, before, strict=True)}
        brought = sum(one.brought - was for one, (was, _) in zip(replicas, before, strict=True))
    counts = np.array([own.total() for own in taken.values()])
    strayed = sum(count for name, own in taken.items() for tenant, count in own.items() if home[tenant] != name)
    return Spread(float(brought / counts.sum()), float(strayed / counts.sum()), float(counts.max() / counts.mean()))
