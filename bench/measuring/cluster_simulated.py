"""Compares what two real replicas answer in time with what the placement's full simulator says, for the same arrivals.

Each tenant is a unit of its own, placed where the router sends it, because the simulator knows no hashing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from bench.measuring.cluster_material import Material, say
from bench.measuring.cluster_traffic import placed, sent
from hplm.engine.profiling import RoundTrip, Source, profile_repository, sources_of
from hplm.placement.placement import Group
from hplm.placement.profile import Profile
from hplm.placement.screen import alone_ns
from hplm.placement.servers import PARAMETERS, Serving
from hplm.placement.simulation import simulate
from hplm.placement.workload import Trace, synthetic
from hplm.server.process_group import computed_ns
from loadtest.load import Load
from loadtest.served_cluster import ServedCluster

TENANTS = 8
LOAD = 0.6  # of what the replicas could compute if every batch were full
FULL = 16  # texts of such a batch
MOST_PER_S = 400.0  # requests: of a toy, the clients and the way through the servers would be measured
SLO_SCALE = 5.0  # deadlines, in times of a lone text
ROUNDS = 2  # of the profile's batches
CONNECTIONS = 128
WARMING_SECONDS = 3.0


def simulated_figures(cluster: ServedCluster, material: Material, cores: Sequence[int]) -> dict[str, float]:
    say("a profile for the simulator")
    (source,) = sources_of(material.repository, [material.backbone])
    round_trips = {source.name: _round_trip(cluster, material, cores)}
    profile = profile_repository([source], [f"cpu:{core}" for core in cores], [1], rounds=ROUNDS, round_trips=round_trips)
    trace = _trace(material, profile)
    groups = _groups(cluster, material, profile, cores)
    say(f"{len(trace):,} requests to two replicas, and to two simulated ones")
    real = _real(cluster, material, trace)
    simulated = simulate(groups, profile, trace, _serving(source)).share
    return {
        "sim_error": round(100 * abs(simulated - real), 2),  # points
        "simulated_attainment": round(simulated, 4),
        "real_attainment": round(real, 4),
    }


def _round_trip(cluster: ServedCluster, material: Material, cores: Sequence[int]) -> RoundTrip:
    """Sends lone requests of one letter through the router. It and the client count if there are no cores but the replicas'."""
    groups = [cluster.pids(name)[1] for name in cluster.replicas]
    is_shared = len(os.sched_getaffinity(0)) == len(cores)
    groups += [cluster.router] if is_shared else []
    before = sum(map(computed_ns, groups))
    lone = sent(cluster.address, Load("", 0, [material.asking("a", material.tenants[0])], seconds=WARMING_SECONDS))
    lone.expect_success("lone requests")
    computed = sum(map(computed_ns, groups)) - before + (1e9 * lone.cpu_s if is_shared else 0)
    return RoundTrip(1e6 * lone.percentile_ms(50), computed / lone.succeeded)


def _unit(material: Material, tenant: str) -> str:
    return f"{material.backbone}/root/{tenant}"


def _trace(material: Material, profile: Profile) -> Trace:
    case, own = material.case, profile.backbones[material.backbone]
    each_ns = own.terms(1).ns(FULL * case.tokens, FULL * case.tokens**2, FULL) / FULL
    rate = min(MOST_PER_S, LOAD * 2 * 1e9 / each_ns) / TENANTS
    units = [_unit(material, tenant) for tenant in material.tenants[:TENANTS]]
    trace = synthetic(dict.fromkeys(units, rate), case.seconds, lengths=case.tokens)
    return trace.with_timeouts(SLO_SCALE * alone_ns(profile, trace))


def _groups(cluster: ServedCluster, material: Material, profile: Profile, cores: Sequence[int]) -> list[Group]:
    """Returns the replicas as groups, each with the tenants that the router sends there."""
    own = placed(cluster, material, material.tenants[:TENANTS])
    whole = ((0, profile.backbones[material.backbone].layers - 1),)
    return [
        Group(name, "here", (f"cpu:{core}",), 1, {material.backbone: whole}, tuple(_unit(material, one) for one in tenants))
        for core, (name, tenants) in zip(cores, own.items(), strict=True)
    ]


def _serving(source: Source) -> Serving:
    return Serving.of({name: value for name, value in source.parameters.items() if name in PARAMETERS})


def _real(cluster: ServedCluster, material: Material, trace: Trace) -> float:
    """Returns the share of the requests that clients have an answer to in time."""
    tenants = material.tenants[:TENANTS]
    requests = [
        material.request(number, tenants[unit], {"timeout": int(timeout_ns // 1000)})
        for number, (unit, timeout_ns) in enumerate(zip(trace.unit.tolist(), trace.timeout_ns.tolist(), strict=True))
    ]
    case = material.case
    sent(cluster.address, Load("", 0, requests, seconds=WARMING_SECONDS, connections=FULL))  # the servers learn their times
    load = Load("", 0, requests, seconds=case.seconds + 1, arrivals=trace.arrival_ns / 1e9, connections=CONNECTIONS)
    report = sent(cluster.address, load)
    allowed_s = trace.timeout_ns[report.numbers] / 1e9
    return float(np.count_nonzero((report.statuses == 200) & (report.latencies <= allowed_s)) / len(trace))
