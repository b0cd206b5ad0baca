"""Placements on two cores of this machine, with real servers: beside the simulators, and AlpaServe's Fig. 2.

Nothing but the measurement may run on this machine. The clients run on the same cores: `measured_rows` adds their work to the
simulated servers'.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.rows import SHORTEST, Row, Rows
from bench.server import texts_of
from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.model_configs import ServingOptions
from hplm.arrays import Array
from hplm.engine.profiling import cores_of
from hplm.engine.settings import Settings
from hplm.errors import Broken, InvalidInput
from hplm.parameters import parameters_of
from hplm.placement.cluster import Cluster, Device, Machine
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile, Terms
from hplm.placement.screen import Screen, alone_ns
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from hplm.placement.stages import equal_cut
from hplm.placement.units import Unit, units_of
from hplm.placement.workload import Trace, synthetic
from hplm.scheduling.simulation.arrivals import Lengths
from hplm.server import TritonServer
from hplm.tenants.models import upper_config
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send
from testing.random_store import SIZES, random_store, random_tenants

LOAD = 0.6  # share of the time that both cores would compute, if texts came one by one
DOMAINS = ("law", "medicine")
LENGTHS, SHARES, CV = Lengths(40, 400, 3, 128), (0.6, 0.4), 2.0  # of the measured load; shares by domain
LOADS = {"poisson": (1.0, (0.5, 0.5)), "cv3": (3.0, (0.5, 0.5)), "skew": (1.0, (0.2, 0.8))}  # of Fig. 2: CV, and shares
FIG2 = {"poisson": 1.15, "cv3": 1.5, "skew": 3.0}  # targets
SIMPLE, PIPELINED = "a core a backbone", "two stages for both"
TOKENS = 64  # of each text of Fig. 2: AlpaServe's requests have one size
ALONE = 40  # requests one by one, which tell the time of a request, and let servers learn theirs
NO_LIMIT = 10**12  # bytes: two small backbones fit anywhere
CONNECTIONS = 200
WARMING_S = 3.0
PATIENT_NS = 10**10
LATEST_S = 2.0  # after the last deadline: by then all answers are there
LATEST_OF_FIG2_S = 20.0  # after the last request, which has no deadline


@dataclass(frozen=True)
class ServedBench:
    size: str
    dtype: str
    tenants: int
    seconds: float  # of requests, for each deadline or load, and placement
    rounds: int  # of the profile, or of the loads


def measured_rows(case: ServedBench, scales: Sequence[float]) -> Rows:
    """Replays one trace at real servers with each deadline, and in both simulators (AlpaServe 6.2).

    Two placements: a server on each of two cores, with half of the tenants each, and one server on both cores.
    """
    with _two_cores() as (folder, cores):
        measured = Measured(case, folder, tuple(f"cpu:{core}" for core in cores))
        points = [point for name in measured.placements for point in measured.points(name, scales)]
    for point in points:
        for name in ("real", "simulated", "screened"):
            yield Row(f"points/{point['placement']}/{point['scale']:g}/{name}", point[name])
    for name, error in errors_of(points).items():
        yield Row(name, error, "points", most={"sim_error_max": 3.0, "sim_error_mean": 2.0}.get(name))
    yield Row("profile_error", measured.profile.error.mean)


def errors_of(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the differences between simulated and real shares, in percentage points. The screen's are the baseline."""
    found: dict[str, float] = {}
    for name, key in (("sim", "simulated"), ("screen", "screened")):
        off = [100 * abs(point[key] - point["real"]) for point in points]
        found |= {f"{name}_error_max": max(off), f"{name}_error_mean": mean(off)}
    return found


def shared_rows(case: ServedBench) -> Rows:
    """Measures AlpaServe's Fig. 2: two backbones with a core each, and both in two stages on both cores, in turns.

    A burst for one backbone then has both cores. Both ways get the same requests.
    """
    with _two_cores() as (folder, cores):
        shared = Shared(case, folder, tuple(f"cpu:{core}" for core in cores))
        with ExitStack() as stack:
            servers = {
                name: [stack.enter_context(pinned(repository, own)) for repository, own in places]
                for name, places in shared.placements(cores).items()
            }
            mean_ms, alone_ms = shared.measured(servers)
    yield Row("alone_ms", alone_ms, "ms")  # a request alone, on one core
    for name, own in mean_ms.items():
        for way, latency in own.items():
            yield Row(f"mean_ms/{name}/{way}", latency, "ms")
        yield Row(f"fig2_{name}", own[SIMPLE] / own[PIPELINED], least=FIG2[name])


@contextmanager
def _two_cores() -> Generator[tuple[Path, list[int]]]:
    """Gives an empty folder and two cores, on which everything runs meanwhile."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise InvalidInput("this machine has one core, but the placements need two: measure on another one")
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder, on_cores(cores):
        yield Path(folder), cores


def _sent(server: TritonServer, requests: list[bytes], due: Array, seconds: float) -> Report:
    host, port = server.http_url.split(":")
    load = Load(host, int(port), requests, seconds, connections=CONNECTIONS, arrivals=due, undisturbed=True)
    return send(load)[0]


class Measured:
    """A repository of random weights, its profile, and a trace."""

    def __init__(self, case: ServedBench, folder: Path, devices: tuple[str, ...]) -> None:
        self._case = case
        self._folder = folder
        self._repository = folder / "repository"
        config = self._config = SIZES[case.size]
        tenants = random_tenants(case.tenants, 32, 4, DOMAINS)
        store = random_store(folder / "store", config, tenants, DOMAINS)
        self._backbone = export(store, self._repository, ServingOptions(dtype=case.dtype, slots=2 * case.tenants)).backbone
        self._tenants = {f"{self._backbone}/{own}": [one.id for one in tenants if one.domain == own] for own in DOMAINS}
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
        rate = 2 * LOAD / (float(one.ns(lengths, lengths**2, 1).mean()) / 1e9)
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

    def points(self, name: str, scales: Sequence[float]) -> list[dict[str, Any]]:
        """Serves a placement, and replays the trace with each deadline."""
        groups = self.placements[name]
        placement = Placement.of(groups, self._units, self._cluster, self.profile)
        emitted = emit(placement, self._repository, self._folder / groups[0].name)
        found: list[dict[str, Any]] = []
        with ExitStack() as stack:
            servers = [stack.enter_context(pinned(one.repository, cores_of(one.group.devices))) for one in emitted]
            beside = self._with_clients(self._warm(groups, servers))
            for scale in tqdm(scales, desc=name, unit="deadline", file=sys.stderr):
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
        due = trace.arrival_ns / 1e9
        seconds = float((due + trace.timeout_ns / 1e9).max()) + LATEST_S
        report = _sent(server, self._requests(trace), due, seconds)
        allowed: Array = trace.timeout_ns[report.numbers] / 1e9
        return int(((report.statuses == 200) & (report.latencies <= allowed)).sum()), report

    def _requests(self, trace: Trace) -> list[bytes]:
        texts = texts_of(self._config, np.maximum(SHORTEST, trace.tokens))
        found: list[bytes] = []
        for i, (text, unit, timeout) in enumerate(zip(texts, trace.unit.tolist(), trace.timeout_ns.tolist(), strict=True)):
            tenants, parameters = self._tenants[trace.names[unit]], {"timeout": max(1, timeout // 1000)}
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


class Shared:
    """A repository of two backbones of one shape, with random weights."""

    def __init__(self, case: ServedBench, folder: Path, devices: tuple[str, ...]) -> None:
        self._case, self._folder, self._devices = case, folder, devices
        self._repository = folder / "repository"
        config = self._config = SIZES[case.size]
        self._layers = config.upper_layers
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

    def measured(self, servers: Mapping[str, list[TritonServer]]) -> tuple[dict[str, dict[str, float]], float]:
        """Returns the mean latencies of both placements under each load, and that of a request alone on one core."""
        alone = {name: [self._alone(server, own) for server, own in self._served(found)] for name, found in servers.items()}
        alone_s = mean(alone[SIMPLE])
        taken: dict[str, dict[str, list[float]]] = {name: {way: [] for way in servers} for name in LOADS}
        rounds = [(number, name, way) for number in range(self._case.rounds) for name in LOADS for way in servers]
        for number, name, way in tqdm(rounds, unit="load", file=sys.stderr):
            taken[name][way] += self._replayed(servers[way], self._drawn(name, alone_s, number))
        mean_ms = {name: {way: 1e3 * mean(found) for way, found in ways.items()} for name, ways in taken.items()}
        return mean_ms, 1e3 * alone_s

    def _served(self, servers: Sequence[TritonServer]) -> list[tuple[TritonServer, str]]:
        """Returns the backbones, each with the server that answers for it."""
        return [(servers[min(number, len(servers) - 1)], name) for number, name in enumerate(self._backbones)]

    def _drawn(self, name: str, alone_s: float, seed: int) -> Trace:
        """Returns a load that keeps the two cores busy for the case's share of the time."""
        cv, shares = LOADS[name]
        rate = 2 * LOAD / alone_s
        rates = {backbone: rate * share for backbone, share in zip(self._backbones, shares, strict=True)}
        return synthetic(rates, self._case.seconds, cv, TOKENS, seed=seed)

    def _replayed(self, servers: Sequence[TritonServer], trace: Trace) -> list[float]:
        """Returns the latencies of all requests, each of which goes to the server of its backbone."""
        served = self._served(servers)
        asked = [(*own, trace.only(trace.unit == number)) for number, own in enumerate(served) if (trace.unit == number).any()]
        with ThreadPoolExecutor(2) as pool:
            reports = pool.map(lambda own: self._answered(*own), asked)
            return [seconds for report in reports for seconds in report.latencies.tolist()]

    def _answered(self, server: TritonServer, backbone: str, trace: Trace) -> Report:
        due = trace.arrival_ns / 1e9
        report = _sent(server, self._requests(backbone, len(due)), due, float(due.max()) + LATEST_OF_FIG2_S)
        report.expect_success(f"the load of {backbone}")
        return report

    def _alone(self, server: TritonServer, backbone: str) -> float:
        """Sends requests one by one. Returns the mean seconds of the later ones."""
        host, port = server.http_url.split(":")
        (report,) = send(Load(host, int(port), self._requests(backbone, ALONE), 120.0, ALONE))
        report.expect_success(f"requests of {backbone}, one by one")
        return float(report.latencies[ALONE // 2 :].mean())

    def _requests(self, backbone: str, count: int) -> list[bytes]:
        texts = texts_of(self._config, [TOKENS] * count)
        return [
            infer_request(backbone, [text], self._tenants[i % len(self._tenants)].id, outputs=("LABEL",))
            for i, text in enumerate(texts)
        ]


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


def _profiled(case: ServedBench, repository: Path, file: Path, devices: Sequence[str]) -> Profile:
    command = [sys.executable, "-m", "hplm.cli.main", "place", "profile"]
    options = ["--devices", ",".join(devices), "--intra", "1,2", "--rounds", str(case.rounds), "--wire"]
    done = subprocess.run([*command, "--repository", str(repository), *options, "--to", str(file)], stdout=sys.stderr)
    if done.returncode:
        raise Broken(f"`hplm place profile` ended with code {done.returncode}: see its messages above")
    return Profile.read(file)
