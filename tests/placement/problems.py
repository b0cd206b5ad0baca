"""Small placement problems: clusters, profiles of backbones with few domains, and random requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hplm.placement.cluster import FORMAT, KIND, Cluster, Device, Machine
from hplm.placement.files import write
from hplm.placement.placement import Group, Placement
from hplm.placement.problem import Groups, Problem
from hplm.placement.profile import BackboneProfile, FitError, Profile, Terms
from hplm.placement.screen import alone_ns
from hplm.placement.units import units_of
from hplm.placement.workload import Trace
from research.papers.placements import equal_cut
from testing.random_trace import random_trace

MB = 1_000_000
MACHINE = {"processor": "a processor", "cores": "2"}
ONE_DOMAIN = {"tenants": {"law": ("a", "b")}, "parents": {}, "table_bytes": {"law": 1}, "record_bytes": 1, "slot_bytes": 0}


def backbone_profile(batch_ns: Sequence[float] = (3e6, 3e6, 1e6), layer_mb: int = 10, **changed: object) -> BackboneProfile:
    """Returns a profile of tenants `a` and `b` of the domain `law`, and `c` of the root. Each layer has a time a batch."""
    times = tuple(Terms(own, 1e4, 1.0, 1e3) for own in batch_ns)
    given: dict[str, object] = {
        "layers": len(times),
        "precision": "fp32",
        "export": "an export",
        "tenants": {"root": ("c",), "law": ("a", "b")},
        "parents": {"law": "root"},
        "entry_bytes": MB,
        "layer_bytes": (layer_mb * MB,) * len(times),
        "table_bytes": {"root": 100 * MB, "law": 20 * MB},
        "record_bytes": MB,
        "slots": 10,
        "slot_bytes": 3 * MB,
        "times": {1: times, 2: tuple(Terms(own / 2, 5e3, 0.5, 1e3) for own in batch_ns)},
        "around": Terms(1e6, 0.0, 0.0, 1e4),
        "core": Terms(2e5, 1e2, 0.0, 1e5),
    }
    return BackboneProfile(**{**given, **changed})  # pyright: ignore[reportArgumentType]


def profile_of(**backbones: BackboneProfile) -> Profile:
    return Profile(MACHINE, backbones or {"bert": backbone_profile()}, Terms(1e5, 10.0), FitError(0.01, 0.03))


def cluster_of(devices: int = 2, memory_mb: int = 100, machines: int = 1, tables_mb: int = 1000) -> Cluster:
    own = tuple(Device(f"cpu:{number}", memory_mb * MB) for number in range(devices))
    return Cluster(tuple(Machine(f"m{number}", own, tables_mb * MB) for number in range(machines)))


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Writes it as an operator does."""
    write(path, KIND, FORMAT, asdict(cluster))


def backbone(ms: float = 8.0, layers: int = 4, layer_mb: int = 10) -> BackboneProfile:
    """Returns a backbone whose text of 64 tokens takes so long on one device, and 0.6 times as long on two."""
    own = Terms(0.0, ms * 1e6 / layers / 64)
    shared = Terms(0.0, 0.6 * own.token_ns)
    times = {1: (own,) * layers, 2: (shared,) * layers}
    return backbone_profile((0,) * layers, layer_mb, times=times, around=Terms(1e5), core=Terms(), entry_bytes=0, **ONE_DOMAIN)


def profile(*ms: float, **changed: int) -> Profile:
    return profile_of(**{f"b{i}": backbone(own, **changed) for i, own in enumerate(ms)})


def trace_of(
    own: Profile, rate: float = 60.0, seconds: float = 20.0, cv: float = 2.0, scale: float = 4.0, seed: int = 0
) -> Trace:
    rates = {unit.name: rate / (1 + i) for i, unit in enumerate(units_of(own))}
    drawn = random_trace(rates, seconds, cv, 64, seed=seed)
    return drawn.with_timeouts(scale * alone_ns(own, drawn))


def problem_of(*ms: float, devices: int = 2, memory_mb: int = 40, most_texts: int = 1, **load: float) -> Problem:
    own = profile(*(ms or (8.0, 8.0)))
    return Problem(cluster_of(devices, memory_mb), own, units_of(own), trace_of(own, **load), most_texts)  # pyright: ignore


def changed(problem: Problem, name: str, **fields: Any) -> Problem:
    """Returns the problem with another profile of a backbone."""
    backbones = problem.profile.backbones
    return replace(problem, profile=replace(problem.profile, backbones={**backbones, name: replace(backbones[name], **fields)}))


def filled(problem: Problem, groups: Groups, *places: tuple[int, str]) -> Groups:
    """Returns the groups with these units: each where it goes, and its backbone. All fit."""
    for at, own in places:
        grown = problem.room.added(groups, at, f"{own}/law")
        assert grown is not None
        groups = grown
    return groups


def group_of(own: Profile, name: str, devices: tuple[str, ...], *backbones: str, intra: int = 1) -> Group:
    stages = len(devices) // intra
    cuts = {one: equal_cut(own.backbones[one].layers, stages) for one in backbones}
    return Group(name, "m0", devices, intra, cuts, tuple(f"{one}/law" for one in backbones))


def write_problem(folder: Path, rate: float) -> None:
    """Writes a problem, and a placement that leaves one of its devices idle.

    c.json is a cluster of four devices, p.json a profile, t.jsonl a recorded trace without deadlines, now.json the placement.
    """
    own = profile(8.0, 8.0, 20.0)
    trace = trace_of(own, rate, 8.0)
    cluster = cluster_of(4, 60)
    write_cluster(cluster, folder / "c.json")
    own.write(folder / "p.json")
    groups = [group_of(own, f"g{i}", (f"cpu:{i}",), backbone) for i, backbone in enumerate(own.backbones)]
    Placement.of(groups, units_of(own), cluster, own).write(folder / "now.json")
    rows = zip(trace.arrival_ns.tolist(), trace.unit.tolist(), trace.tokens.tolist(), strict=True)
    lines = [json.dumps({"arrival": at / 1e9, "tokens": tokens, "unit": trace.names[unit]}) for at, unit, tokens in rows]
    (folder / "t.jsonl").write_text("\n".join(lines))
