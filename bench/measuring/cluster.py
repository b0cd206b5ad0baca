"""Measures clusters that `hplm cluster up` runs on this machine: with two replicas, each on a core, and with three."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.cluster import ClusterBench
from bench.measuring.cluster_changes import change_figures, revoke_figures
from bench.measuring.cluster_faults import kill_figures, roll_figures
from bench.measuring.cluster_material import make_material, say
from bench.measuring.cluster_overflow import overflow_figures
from bench.measuring.cluster_proxy import proxy_figures
from bench.measuring.cluster_ring import ring_figures
from bench.measuring.cluster_simulated import simulated_figures
from bench.measuring.cluster_spread import limit_figures, spread_figures
from hplm.errors import HplmError
from loadtest.served_cluster import ServedCluster

TARGETS = {  # of issue 24: the bound, and whether a figure may be at most or has to be at least this
    "proxy_over_direct": (">=", 0.95),
    "hop_p50_ms": ("<=", 0.5),
    "hash_over_round_robin": ("<=", 0.5),
    "busiest_over_mean": ("<=", 1.3),
    "moved_share": ("<=", 0.4),
    "kill_unanswered": ("<=", 0),
    "kill_wrong": ("<=", 0),
    "reroute_s": ("<=", 2.0),
    "roll_failures": ("<=", 0),
    "add_p99_s": ("<=", 1.0),
    "after_delete": ("<=", 0),
    "revoke_s": ("<=", 1.0),
    "revoked_while_travelling": (">=", 1),  # replicas; else the table was too small
    "limit_ratio": ("<=", 1.05),
    "limit_least": (">=", 0.9),  # else the limit was not reached
    "sim_error": ("<=", 3.0),  # points
}
WITH_TWO = {
    "proxy": lambda cluster, material, cores: proxy_figures(cluster, material),
    "simulation": simulated_figures,
    "changes": lambda cluster, material, cores: change_figures(cluster, material),
    "revoke": lambda cluster, material, cores: revoke_figures(cluster, material),
    "faults": lambda cluster, material, cores: kill_figures(cluster, material) | roll_figures(cluster, material),
}
WITH_THREE = {"spread": spread_figures, "limits": limit_figures}
WITH_STAND_INS = {"ring": ring_figures, "overflow": overflow_figures}


def bench_cluster(case: ClusterBench) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise HplmError("this machine has one core, but each of two servers needs its own: use another machine")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:  # a short path, for sockets
        material = make_material(Path(folder), case)
        if wanted := [part for part in WITH_TWO if part in case.parts]:
            say("two servers")
            with ServedCluster(material.repository, Path(folder) / "two", 2, cores) as cluster:
                for part in wanted:
                    figures |= WITH_TWO[part](cluster, material, cores)
        if wanted := [part for part in WITH_THREE if part in case.parts]:
            say("three servers")
            with ServedCluster(material.repository, Path(folder) / "three", 3) as cluster:
                for part in wanted:
                    figures |= WITH_THREE[part](cluster, material)
        for part in (part for part in WITH_STAND_INS if part in case.parts):
            figures |= WITH_STAND_INS[part](Path(folder) / part, material)
    figures["targets"] = {name: met(name, figures[name]) for name in TARGETS if name in figures}
    return figures | {"case": asdict(case)}


def met(name: str, figure: float) -> bool:
    bound, target = TARGETS[name]
    return figure <= target if bound == "<=" else figure >= target


def table_of(figures: Mapping[str, Any]) -> str:
    """Returns the figures beside their targets, and then the others."""
    lines = [
        f"{name:<32}{figures[name]:>12,.3f}  {bound} {target:g}: {'met' if figures['targets'][name] else 'missed'}"
        for name, (bound, target) in TARGETS.items()
        if name in figures
    ]
    others = [name for name, figure in figures.items() if name not in TARGETS and isinstance(figure, int | float)]
    return "\n".join([*lines, "", *(f"{name:<32}{figures[name]:>12,.3f}" for name in others)])
