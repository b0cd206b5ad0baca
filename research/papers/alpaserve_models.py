"""AlpaServe's models, clusters and loads, from the paper's tables. What comes from them is simulated: no V100 was used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hplm.placement.cluster import Cluster, Device, Machine
from hplm.placement.problem import Problem
from hplm.placement.profile import BackboneProfile, FitError, Profile, Terms
from hplm.placement.screen import alone_ns
from hplm.placement.units import units_of
from testing.random_trace import power_law, random_trace

PAPER: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
ASSUMED = PAPER["assumed"]
TOKENS = 2048
DOMAIN = "all"
A_MACHINE = 8  # devices
EXPONENT = 0.5  # of the power law of the models' rates
NO_LIMIT = 10**15  # bytes of a machine: these models have no tables


def models(numbers: dict[str, int]) -> list[str]:
    """Returns the kind of each model, taking turns, so that a power law of rates does not favour one kind."""
    most = max(numbers.values())
    return [kind for i in range(most) for kind, count in numbers.items() if i < count]


def profile_of(kinds: Sequence[str]) -> Profile:
    """Returns a profile in which every model is a backbone of its own: the paper's share nothing."""
    backbones = {f"model-{i}": backbone_of(kind) for i, kind in enumerate(kinds)}
    return Profile({"processor": PAPER["source"]}, backbones, Terms(ASSUMED["hop_ms"] * 1e6), FitError(0.0, 0.0))


def cluster_of(devices: int, device_bytes: float = PAPER["device_bytes"], a_machine: int = A_MACHINE) -> Cluster:
    machines = [range(first, min(first + a_machine, devices)) for first in range(0, devices, a_machine)]
    return Cluster(
        tuple(
            Machine(f"machine-{i}", tuple(Device(f"cuda:{j - own[0]}", int(device_bytes)) for j in own), NO_LIMIT)
            for i, own in enumerate(machines)
        )
    )


def problem_of(
    kinds: Sequence[str],
    devices: int,
    rate: float,
    cv: float,
    slo_scale: float,
    seconds: float,
    seed: int = 0,
    shares: Sequence[float] | None = None,
    device_bytes: float = PAPER["device_bytes"],
    most_texts: int = 1,
    a_machine: int = A_MACHINE,
) -> Problem:
    """`rate`: of all models together. `shares`: of each; by default they follow the power law."""
    profile = profile_of(kinds)
    units = units_of(profile)
    parts = power_law(len(kinds), EXPONENT) if shares is None else shares
    trace = random_trace(
        {unit.name: rate * float(part) for unit, part in zip(units, parts, strict=True)}, seconds, cv, TOKENS, seed=seed
    )
    computing_ns = alone_ns(profile, trace) - ASSUMED["dispatch_ms"] * 1e6  # the paper's deadlines do not allow for dispatch
    trace = trace.with_timeouts(slo_scale * computing_ns)
    return Problem(cluster_of(devices, device_bytes, a_machine), profile, units, trace, most_texts)


def backbone_of(kind: str, pieces: int = 1, ends: tuple[float, float] = (0.0, 0.0)) -> BackboneProfile:
    """Returns a model with so many pieces a layer. `ends`: by how many layers its first and its last piece take longer."""
    model = PAPER["models"][kind]
    weights = np.ones(pieces * model["layers"])
    weights[[0, -1]] += pieces * np.array(ends)
    times = {
        int(intra): tuple(Terms(0.0, share * model["ms"] * 1e6 * own / weights.sum() / TOKENS) for own in weights.tolist())
        for intra, share in ASSUMED["intra_times"].items()
    }
    return BackboneProfile(
        layers=len(weights), precision="fp16", export=PAPER["source"], tenants={DOMAIN: ("all",)}, parents={}, entry_bytes=0,
        layer_bytes=(model["bytes"] // len(weights),) * len(weights), table_bytes={DOMAIN: 0}, record_bytes=0, slots=NO_LIMIT,
        slot_bytes=0, times=times, around=Terms(ASSUMED["dispatch_ms"] * 1e6),
    )  # fmt: skip
