"""Beside the simulators: the same trace at real servers on the cores of this machine, with several deadlines (AlpaServe 6.2).

Two placements: a server on each of two cores, with half of the tenants each, and one server on both cores. Nothing but the
measurement may run on this machine: the clients' own work is measured, and the simulators add it to the servers'.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.place import MeasuredBench
from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.model_configs import ServingOptions
from hplm.arrays import Array
from hplm.engine.profiling import cores_of
from hplm.errors import Broken, InvalidInput
from hplm.placement.cluster import Cluster, Device, Machine
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile, Terms
from hplm.placement.screen import Screen, alone_ns
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from hplm.placement.units import units_of
from hplm.placement.workload import Trace, synthetic
from hplm.scheduling.simulation.arrivals import Lengths
from hplm.server import TritonServer
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from testing.random_store import SIZES, random_store, random_tenants, words

DOMAINS = ("law", "medicine")
LENGTHS = Lengths(40, 400, 3, 128)
SHARES = (0.6, 0.4)  # of the load
CV = 2.0
TARGETS = {"sim_error_max": 3.0, "sim_error_mean": 2.0}
NO_LIMIT = 10**12  # bytes: two small backbones fit anywhere
CONNECTIONS = 200
WARMING_S = 3.0
PATIENT_NS = 10**10
LATEST_S = 2.0  # after the last deadline: by then all answers are there


def bench_measured(case: MeasuredBench) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise InvalidInput("this machine has one core, but the placements need two: measure on another one")
    devices = tuple(f"cpu:{core}" for core in cores)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder, on_cores(cores):  # clients too: their work is added
        measured = Measured(case, Path(folder), devices)
        points = [point for name in measured.placements for point in measured.points(name)]
    return {**figures_of(points), "profile_error": measured.profile.error.mean, "points": points, "targets": TARGETS}


def table_of(figures: dict[str, Any]) -> str:
    lines = [f"{'placement':<20}{'deadline':>10}{'real':>9}{'full simulator':>16}{'screen':>9}"]
    lines += [
        f"{own['placement']:<20}{own['scale']:>8g} x{own['real']:>9.1%}{own['simulated']:>16.1%}{own['screened']:>9.1%}"
        for own in figures["points"]
    ]
    for name in ("max", "mean"):
        own, others, target = (figures[f"sim_error_{name}"], figures[f"screen_error_{name}"], TARGETS[f"sim_error_{name}"])
        lines.append(f"sim_error_{name}: {own:.2f} percentage points (target {target:g}); the screen's {others:.2f}")
    return "\n".join(lines)


def figures_of(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the differences between simulated and real shares, in percentage points. The screen's are the baseline."""
    found: dict[str, float] = {}
    for name, key in (("sim", "simulated"), ("screen", "screened")):
        off = [100 * abs(point[key] - point["real"]) for point in points]
        found |= {f"{name}_error_max": max(off), f"{name}_error_mean": mean(off)}
    return found


class Measured:
    """A repository of random weights, its profile, and a trace."""

    def __init__(self, case: MeasuredBench, folder: Path, devices: tuple[str, ...]) -> None:
        self._case = case
        self._folder = folder
        self._repository = folder / "repository"
        config = SIZES[case.size]
        tenants = random_tenants(case.tenants, 32, 4, DOMAINS)
        store = random_store(folder / "store", config, tenants, DOMAINS)
        self._backbone = export(store, self._repository, ServingOptions(dtype=case.dtype, slots=2 * case.tenants)).backbone
        self._tenants = {f"{self._backbone}/{own}": [one.id for one in tenants if one.domain == own] for own in DOMAINS}
        self._words = words(config.vocabulary)
        self.profile = _profiled(case, self._repository, folder / "profile.json", devices)
        self._cluster = Cluster((Machine("here", tuple(Device(name, NO_LIMIT) for name in devices), NO_LIMIT),))
        self._units = units_of(self.profile)
        self._trace = self._drawn()
        self.placements = self._placements(devices)

    def _drawn(self) -> Trace:
        """Returns a load that keeps the two cores busy for the case's share of the time."""
        names = [unit.name for unit in self._units]
        own = self.profile.backbones[self._backbone]
        one = own.terms(1) + own.core
        lengths = LENGTHS.draw(10_000, np.random.default_rng(0))
        rate = 2 * self._case.load / (float(one.ns(lengths, lengths**2, 1).mean()) / 1e9)
        rates = {name: rate * share for name, share in zip(names, SHARES, strict=True)}
        return synthetic(rates, self._case.seconds, CV, LENGTHS, seed=1)

    def _placements(self, devices: tuple[str, ...]) -> dict[str, tuple[Group, ...]]:
        whole = {self._backbone: ((0, self.profile.backbones[self._backbone].layers - 1),)}
        names = [unit.name for unit in self._units]
        apart = tuple(
            Group(f"core-{i}", "here", (device,), 1, whole, (name,))
            for i, (device, name) in enumerate(zip(devices, names, strict=True))
        )
        return {"a server a core": apart, "two cores a stage": (Group("both", "here", devices, 2, whole, tuple(names)),)}

    def points(self, name: str) -> list[dict[str, Any]]:
        """Serves a placement, and replays the trace with each deadline."""
        groups = self.placements[name]
        placement = Placement.of(groups, self._units, self._cluster, self.profile)
        emitted = emit(placement, self._repository, self._folder / groups[0].name)
        found: list[dict[str, Any]] = []
        with ExitStack() as stack:
            servers = [stack.enter_context(pinned(one.repository, cores_of(one.group.devices))) for one in emitted]
            beside = self._with_clients(self._warm(groups, servers))
            for scale in tqdm(self._case.scales, desc=name, unit="deadline", file=sys.stderr):
                trace = self._trace.with_timeouts(scale * alone_ns(self.profile, self._trace))
                real = sum(in_time for in_time, _ in self._replayed(groups, servers, trace)) / len(trace)
                found.append({
                    "placement": name, "scale": scale, "real": real,
                    "simulated": simulate(groups, beside, trace, Serving()).share,
                    "screened": Screen(beside, trace).attained(groups).share,
                })  # fmt: skip
        return found

    def _replayed(self, groups: Sequence[Group], servers: Sequence[TritonServer], trace: Trace) -> list[tuple[int, Report]]:
        """Returns how many answers clients get in time. Each group's requests go to its own server."""
        units = [[trace.names.index(name) for name in group.units] for group in groups]
        parts = [trace.only(np.isin(trace.unit, own)) for own in units]
        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(self._in_time, servers, parts))

    def _in_time(self, server: TritonServer, trace: Trace) -> tuple[int, Report]:
        host, port = server.http_url.split(":")
        due = trace.arrival_ns / 1e9
        seconds = float((due + trace.timeout_ns / 1e9).max()) + LATEST_S
        load = Load(
            host, int(port), self._requests(trace), seconds=seconds, connections=CONNECTIONS, arrivals=due, undisturbed=True
        )  # fmt: skip
        (report,) = send(load)
        allowed: Array = trace.timeout_ns[report.numbers] / 1e9
        return int(((report.statuses == 200) & (report.latencies <= allowed)).sum()), report

    def _requests(self, trace: Trace) -> list[bytes]:
        rng = np.random.default_rng(2)
        found: list[bytes] = []
        columns = zip(trace.unit.tolist(), trace.tokens.tolist(), trace.timeout_ns.tolist(), strict=True)
        for i, (unit, tokens, timeout) in enumerate(columns):
            drawn: list[int] = rng.integers(len(self._words), size=max(1, tokens - 2)).tolist()
            tenants = self._tenants[trace.names[unit]]
            text = " ".join(self._words[number] for number in drawn)
            parameters = {"timeout": max(1, timeout // 1000)}
            found.append(
                infer_request(self._backbone, [text], tenants[i % len(tenants)], outputs=("LABEL",), parameters=parameters)
            )
        return found

    def _warm(self, groups: Sequence[Group], servers: Sequence[TritonServer]) -> float:
        """Lets servers learn their times, with deadlines that refuse nothing. Returns a client's nanoseconds a request."""
        patient = self._trace.with_timeouts(np.full(len(self._trace), PATIENT_NS))
        reports = [report for _, report in self._replayed(groups, servers, patient.between(0, int(WARMING_S * 1e9)))]
        for report in reports:
            report.expect_success("the time of a client", "give --measured-seconds more")
        return 1e9 * sum(report.cpu_s for report in reports) / sum(len(report.statuses) for report in reports)

    def _with_clients(self, client_ns: float) -> Profile:
        """Returns the profile of cores that the clients use too."""
        own = self.profile.backbones[self._backbone]
        beside = replace(own, core=own.core + Terms(text_ns=client_ns))
        return replace(self.profile, backbones={self._backbone: beside})


@contextmanager
def pinned(repository: Path, cores: Sequence[int]) -> Generator[TritonServer]:
    server = TritonServer(repository)
    try:
        with on_cores(cores):
            server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def on_cores(cores: Sequence[int]) -> Generator[None]:
    """Keeps this thread, and the threads and processes that it starts, on these cores, as `taskset` would."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _profiled(case: MeasuredBench, repository: Path, file: Path, devices: Sequence[str]) -> Profile:
    command = [sys.executable, "-m", "hplm.cli.main", "place", "profile"]
    options = ["--devices", ",".join(devices), "--intra", "1,2", "--rounds", str(case.rounds), "--wire"]
    done = subprocess.run([*command, "--repository", str(repository), *options, "--to", str(file)], stdout=sys.stderr)
    if done.returncode:
        raise Broken(f"`hplm place profile` ended with code {done.returncode}: see its messages above")
    return Profile.read(file)
