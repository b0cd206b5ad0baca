"""AlpaServe's Fig. 2 with real servers: two backbones on two cores of this machine.

Simple placement gives each backbone a server on a core of its own. The other way is one server, whose engine computes both
backbones in two stages, one on each core. A burst for one backbone then has both cores. Both ways get the same requests, in
turns. The clients run on the same cores. Nothing but the measurement may run on this machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.measuring.place_measured import on_cores, pinned
from bench.place import SharedBench
from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.model_configs import ServingOptions
from hplm.engine.settings import Settings
from hplm.errors import InvalidInput
from hplm.parameters import parameters_of
from hplm.placement.placement import Group, Placement
from hplm.placement.stages import equal_cut
from hplm.placement.units import Unit
from hplm.placement.workload import Trace, synthetic
from hplm.server import TritonServer
from hplm.tenants.models import upper_config
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from testing.random_store import SIZES, random_store, random_tenants, words

LOADS = {"poisson": (1.0, (0.5, 0.5)), "cv3": (3.0, (0.5, 0.5)), "skew": (1.0, (0.2, 0.8))}  # CV, and shares of the load
TARGETS = {"fig2_poisson": 1.15, "fig2_cv3": 1.5, "fig2_skew": 3.0}
SIMPLE, PIPELINED = "a core a backbone", "two stages for both"
TOKENS = 64  # of each text: AlpaServe's requests have one size
ALONE = 40  # requests one by one, which tell the time of a request, and let servers learn theirs
CONNECTIONS = 200
LATEST_S = 20.0  # after the last request: by then all answers are there


def bench_shared(case: SharedBench) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise InvalidInput("this machine has one core, but Fig. 2 needs two: measure on another one")
    devices = tuple(f"cpu:{core}" for core in cores)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder, on_cores(cores):
        shared = Shared(case, Path(folder), devices)
        with ExitStack() as stack:
            return shared.measured({
                name: [stack.enter_context(pinned(folder, own)) for folder, own in places]
                for name, places in shared.placements(cores).items()
            })  # fmt: skip


def table_of(figures: dict[str, Any]) -> str:
    lines = [f"{'load':<10}{SIMPLE:>22}{PIPELINED:>22}{'ratio':>8}{'target':>8}"]
    for name in LOADS:
        own, key = figures["mean_ms"][name], f"fig2_{name}"
        lines.append(
            f"{name:<10}{own[SIMPLE]:>19.1f} ms{own[PIPELINED]:>19.1f} ms{figures[key]:>8.2f}{figures['targets'][key]:>8g}"
        )
    lines.append(f"a request alone: {figures['alone_ms']:.1f} ms on one core")
    return "\n".join(lines)


class Shared:
    """A repository of two backbones of one shape, with random weights."""

    def __init__(self, case: SharedBench, folder: Path, devices: tuple[str, ...]) -> None:
        self._case, self._folder, self._devices = case, folder, devices
        self._repository = folder / "repository"
        config = SIZES[case.size]
        self._layers, self._words = config.upper_layers, words(config.vocabulary)
        self._backbones = tuple(f"{config.name}-{letter}" for letter in "ab")
        self._tenants = random_tenants(case.tenants, 32, 4)
        for seed, name in enumerate(self._backbones):
            store = random_store(folder / name, replace(config, name=name), self._tenants, seed=seed)
            export(store, self._repository, ServingOptions(dtype=case.dtype, slots=3 * case.tenants))

    def placements(self, cores: Sequence[int]) -> dict[str, list[tuple[Path, Sequence[int]]]]:
        """Writes the repositories of both placements. Returns them with their cores."""
        whole, halves = equal_cut(self._layers, 1), equal_cut(self._layers, 2)
        units = {name: f"{name}/root" for name in self._backbones}
        apart = [
            Group(name, "here", (device,), 1, {name: whole}, (units[name],))
            for name, device in zip(self._backbones, self._devices, strict=True)
        ]
        both = Group("both", "here", self._devices, 1, dict.fromkeys(self._backbones, halves), tuple(units.values()))
        exports = {name: Snapshot.load(self._repository / name / "1/tenants.json").export for name in self._backbones}
        precisions = {
            name: Settings.read(parameters_of(upper_config(self._repository, name))).precision.name for name in self._backbones
        }
        placed = tuple(Unit(unit, len(self._tenants)) for unit in units.values())
        placement = Placement((*apart, both), placed, precisions, exports, "these cores", "none")
        *simple, pipelined = (one.repository for one in emit(placement, self._repository, self._folder / "groups"))
        return {SIMPLE: [(own, [core]) for own, core in zip(simple, cores, strict=True)], PIPELINED: [(pipelined, cores)]}

    def measured(self, servers: Mapping[str, list[TritonServer]]) -> dict[str, Any]:
        """Returns the mean latencies of both placements under each load, and their ratios."""
        alone = {name: [self._alone(server, own) for server, own in self._served(found)] for name, found in servers.items()}
        alone_s = mean(alone[SIMPLE])
        taken: dict[str, dict[str, list[float]]] = {name: {way: [] for way in servers} for name in LOADS}
        rounds = [(number, name, way) for number in range(self._case.rounds) for name in LOADS for way in servers]
        for number, name, way in tqdm(rounds, unit="load", file=sys.stderr):
            taken[name][way] += self._replayed(servers[way], self._drawn(name, alone_s, number))
        mean_ms = {name: {way: 1e3 * mean(found) for way, found in ways.items()} for name, ways in taken.items()}
        ratios = {f"fig2_{name}": own[SIMPLE] / own[PIPELINED] for name, own in mean_ms.items()}
        return {**ratios, "mean_ms": mean_ms, "alone_ms": 1e3 * alone_s, "targets": TARGETS}

    def _served(self, servers: Sequence[TritonServer]) -> list[tuple[TritonServer, str]]:
        """Returns the backbones, each with the server that answers for it."""
        return [(servers[min(number, len(servers) - 1)], name) for number, name in enumerate(self._backbones)]

    def _drawn(self, name: str, alone_s: float, seed: int) -> Trace:
        """Returns a load that keeps the two cores busy for the case's share of the time."""
        cv, shares = LOADS[name]
        rate = 2 * self._case.load / alone_s
        rates = {backbone: rate * share for backbone, share in zip(self._backbones, shares, strict=True)}
        return synthetic(rates, self._case.seconds, cv, TOKENS, seed=seed)

    def _replayed(self, servers: Sequence[TritonServer], trace: Trace) -> list[float]:
        """Returns the latencies of all requests, each of which goes to the server of its backbone."""
        served = self._served(servers)
        asked = [(*own, trace.only(trace.unit == number)) for number, own in enumerate(served) if (trace.unit == number).any()]
        with ThreadPoolExecutor(2) as pool:
            reports = pool.map(lambda own: self._sent(*own), asked)
            return [seconds for report in reports for seconds in report.latencies.tolist()]

    def _sent(self, server: TritonServer, backbone: str, trace: Trace) -> Report:
        due = trace.arrival_ns / 1e9
        seconds = float(due.max()) + LATEST_S
        host, port = server.http_url.split(":")
        texts = self._requests(backbone, len(due))
        load = Load(host, int(port), texts, seconds, connections=CONNECTIONS, arrivals=due, undisturbed=True)
        (report,) = send(load)
        report.expect_success(f"the load of {backbone}")
        return report

    def _alone(self, server: TritonServer, backbone: str) -> float:
        """Sends requests one by one. Returns the mean seconds of the later ones."""
        host, port = server.http_url.split(":")
        (report,) = send(Load(host, int(port), self._requests(backbone, ALONE), 120.0, ALONE))
        report.expect_success(f"requests of {backbone}, one by one")
        return float(report.latencies[ALONE // 2 :].mean())

    def _requests(self, backbone: str, count: int) -> list[bytes]:
        drawn = np.random.default_rng(2).integers(len(self._words), size=(count, TOKENS - 2))
        texts = (" ".join(self._words[number] for number in own) for own in drawn.tolist())
        return [
            infer_request(backbone, [text], self._tenants[i % len(self._tenants)].id, outputs=("LABEL",))
            for i, text in enumerate(texts)
        ]
