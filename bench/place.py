"""`hplm bench place`: placements on two cores of this machine, with real servers, beside the simulators and each other.

Nothing but the measurement may run on this machine, because the clients run on the same cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
from tqdm import tqdm

from bench.rows import SHORTEST, EngineDtype, Positive, Row, Rows, Size, Whole, benchmark
from bench.server import texts_of
from builder.publish.export import export
from builder.publish.groups import emit
from builder.publish.model_configs import ServingOptions
from hplm.errors import Broken, InvalidInput
from hplm.placement.cluster import Cluster, Device, Machine
from hplm.placement.measuring import cores_of
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile, Terms
from hplm.placement.screen import Screen, alone_ns
from hplm.placement.servers import Serving
from hplm.placement.simulation import simulate
from hplm.placement.stages import equal_cut
from hplm.placement.units import units_of
from hplm.placement.workload import Trace
from hplm.server import TritonServer
from hplm.simulate.arrivals import Lengths
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send
from testing.random_repository import LABELS, RANK
from testing.random_store import SIZES, random_store, random_tenants
from testing.random_trace import random_trace

LOAD = 0.6  # share of the time that both cores would compute, if texts came one by one
SCALES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)  # deadlines: multiples of a text's time on one core
MOST, SHARES, CV = 128, (0.6, 0.4), 2.0  # of the load with deadlines: tokens of a text, and shares by domain
TOKENS = 64  # of each text of Fig. 2: AlpaServe's requests have one size
LOADS = {"poisson": (1.0, (0.5, 0.5)), "cv3": (3.0, (0.5, 0.5)), "skew": (1.0, (0.2, 0.8))}  # of Fig. 2: CV, and shares
FIG2 = {"poisson": 1.15, "cv3": 1.5, "skew": 3.0}  # targets
SIMPLE, PIPELINED = "a core a backbone", "two stages for both"
NO_LIMIT = 10**12  # bytes: two small backbones fit anywhere
CONNECTIONS = 200
WARMING_S = 3.0
STDERR = 2  # for the messages of other programs
LATEST_S = 20.0  # after the last request: by then all answers are there

Servers = dict[str, TritonServer]  # by the unit that they serve


@benchmark(shared=True, size="toy", measured_seconds=0.4, scales=(4.0,), tenants=2, rounds=1)
def place(
    *,
    measured: bool = False,
    shared: bool = False,
    size: Size = "bert-base",
    dtype: EngineDtype = "auto",
    measured_seconds: Positive = 25.0,
    scales: tuple[Positive, ...] = SCALES,
    tenants: Whole = 8,
    rounds: Whole = 5,
) -> Rows:
    """Serves two placements on two cores, replays the same traces at both, and compares them (AlpaServe 6.2 and Fig. 2).

    `python -m research.papers alpaserve` simulates AlpaServe's own models and devices.

    :param measured: only a server on each core, and one on both, beside their simulation
    :param shared: only two backbones with a core each, and both in two stages on both cores
    :param size: of the model
    :param dtype: precision of the engine
    :param measured_seconds: of requests for each deadline or load, and placement
    :param scales: deadlines, as multiples of a text's time on one core
    :param tenants: of each repository
    :param rounds: of the profile, and of the loads of Fig. 2. One is a trial: it assumes the way through a server
    """
    if measured or not shared:
        with _two_cores(size, dtype, tenants, rounds, 1, "1,2", ("law", "medicine")) as cores:
            yield from _simulators(cores, measured_seconds, scales)
    if shared or not measured:
        with _two_cores(size, dtype, tenants, rounds, 2, "1") as cores:
            yield from _fig2(cores, measured_seconds, rounds)


def _simulators(cores: TwoCores, seconds: float, scales: Sequence[float]) -> Rows:
    """Two placements: a server on each of two cores, with half of the tenants each, and one server on both cores."""
    trace = cores.drawn(seconds, CV, SHARES, Lengths(40, 400, SHORTEST, min(MOST, cores.positions)), seed=1)
    placements = {"a server a core": cores.apart(), "two cores a stage": cores.together(stages=1)}
    errors: dict[str, list[float]] = {"sim": [], "screen": []}  # in percentage points
    for name, groups in placements.items():
        with cores.serving(groups) as servers:
            profile = cores.with_clients(cores.warmed(servers, trace))
            for scale in tqdm(scales, desc=name, unit="deadline", file=sys.stderr):
                asked = trace.with_timeouts(scale * alone_ns(cores.profile, trace))
                replayed = cores.replayed(servers, asked)
                shares = {
                    "real": sum(int(own.in_time(part.timeout_ns / 1e9).sum()) for part, own in replayed) / len(asked),
                    "simulated": simulate(groups, profile, asked, Serving()).share,
                    "screened": Screen(profile, asked).attained(groups).share,
                }
                for way, share in shares.items():
                    yield Row(f"points/{name}/{scale:g}/{way}", share)
                for simulator, way in (("sim", "simulated"), ("screen", "screened")):
                    errors[simulator].append(100 * abs(shares[way] - shares["real"]))
    for simulator, off in errors.items():  # the screen's are the baseline
        most, average = (3.0, 2.0) if simulator == "sim" else (None, None)
        yield Row(f"{simulator}_error_max", max(off), "points", most=most)
        yield Row(f"{simulator}_error_mean", mean(off), "points", most=average)
    yield Row("profile_error", cores.profile.error.mean)


def _fig2(cores: TwoCores, seconds: float, rounds: int) -> Rows:
    """A burst for one of two backbones has both cores, if these are two stages for both. Both ways get the same requests."""
    with ExitStack() as stack:
        ways = {SIMPLE: cores.apart(), PIPELINED: cores.together(stages=2)}
        servers = {way: stack.enter_context(cores.serving(groups)) for way, groups in ways.items()}
        taken: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in LOADS}
        for way in ways:
            cores.warmed(servers[way], cores.drawn(min(WARMING_S, seconds), 1.0, (0.5, 0.5), TOKENS, seed=0))
        turns = [(number, name, way) for number in range(rounds) for name in LOADS for way in ways]
        for number, name, way in tqdm(turns, unit="load", file=sys.stderr):
            trace = cores.drawn(seconds, *LOADS[name], TOKENS, seed=number)
            for _, report in cores.replayed(servers[way], trace):
                report.expect_success(f"the load {name}")
                taken[name][way] += report.latencies.tolist()
    for name, own in taken.items():
        for way, seconds_of in own.items():
            yield Row(f"mean_ms/{name}/{way}", 1e3 * mean(seconds_of), "ms")
        yield Row(f"fig2_{name}", mean(own[SIMPLE]) / mean(own[PIPELINED]), least=FIG2[name])


class TwoCores:
    """A repository of random weights with two units, and its profile."""

    def __init__(
        self, folder: Path, size: str, dtype: str, tenants: int, rounds: int, backbones: int, intra: str, domains: Sequence[str]
    ) -> None:
        """`intra`: numbers of devices in a stage."""
        self._devices = tuple(f"cpu:{core}" for core in sorted(os.sched_getaffinity(0)))
        self._folder, self._config = folder, SIZES[size]
        self._repository = folder / "repository"
        files = random_tenants(tenants, RANK, LABELS, domains or ("root",))
        for seed in range(backbones):
            config = replace(self._config, name=f"{size}-{'ab'[seed]}")
            store = random_store(folder / config.name, config, files, domains, seed=seed)
            export(store, self._repository, ServingOptions(dtype=dtype, slots=3 * tenants))
        self.profile = _profiled(self._repository, folder / "profile.json", self._devices, intra, rounds)
        self._cluster = Cluster((Machine("here", tuple(Device(name, NO_LIMIT) for name in self._devices), NO_LIMIT),))
        self._units = units_of(self.profile)
        self._layers, self.positions = self._config.upper_layers, self._config.positions

    def apart(self) -> tuple[Group, ...]:
        """Returns a group for each unit, with a core of its own."""
        whole = equal_cut(self._layers, 1)
        return tuple(
            Group(f"core-{i}", "here", (device,), 1, {unit.backbone: whole}, (unit.name,))
            for i, (device, unit) in enumerate(zip(self._devices, self._units, strict=True))
        )

    def together(self, stages: int) -> tuple[Group, ...]:
        """Returns one group for both units, with both cores."""
        cuts = {unit.backbone: equal_cut(self._layers, stages) for unit in self._units}
        return (Group("both", "here", self._devices, 2 // stages, cuts, tuple(unit.name for unit in self._units)),)

    def drawn(self, seconds: float, cv: float, shares: Sequence[float], lengths: Lengths | int, seed: int) -> Trace:
        """Returns a load that keeps the two cores busy for `LOAD` of the time."""
        own = next(iter(self.profile.backbones.values()))
        tokens = np.full(1, lengths) if isinstance(lengths, int) else lengths.draw(10_000, np.random.default_rng(0))
        rate = 2 * LOAD / (float((own.terms(1) + own.core).ns(tokens, tokens**2, 1).mean()) / 1e9)
        rates = {unit.name: rate * share for unit, share in zip(self._units, shares, strict=True)}
        return random_trace(rates, seconds, cv, lengths, seed=seed)

    @contextmanager
    def serving(self, groups: tuple[Group, ...]) -> Generator[Servers]:
        """Starts a server for each group, on its cores."""
        placement = Placement.of(groups, self._units, self._cluster, self.profile)
        to = Path(tempfile.mkdtemp(dir=self._folder)) / "groups"
        servers: Servers = {}
        with ExitStack() as stack:
            for one in emit(placement, self._repository, to):
                with on_cores(cores_of(one.group.devices)):
                    server = stack.enter_context(TritonServer(one.repository))
                servers |= dict.fromkeys(one.group.units, server)
            yield servers

    def replayed(self, servers: Servers, trace: Trace) -> list[tuple[Trace, Report]]:
        """Sends each unit's requests to its own server. Returns each server's part of the trace, with its report."""
        own = {server: np.array([servers[name] is server for name in trace.names])[trace.unit] for server in servers.values()}
        parts = {server: trace.only(mine) for server, mine in own.items() if mine.any()}
        last = float((trace.arrival_ns + trace.timeout_ns).max()) / 1e9 + LATEST_S
        loads = [
            Load(
                server.http_url, self._requests(part), seconds=last, connections=CONNECTIONS, arrivals=part.arrival_ns / 1e9,
                undisturbed=True,
            )
            for server, part in parts.items()
        ]  # fmt: skip
        return list(zip(parts.values(), send(*loads), strict=True))

    def _requests(self, trace: Trace) -> list[bytes]:
        texts, found = texts_of(self._config, np.maximum(SHORTEST, trace.tokens)), []
        for i, (text, unit, timeout_ns) in enumerate(zip(texts, trace.unit.tolist(), trace.timeout_ns.tolist(), strict=True)):
            backbone, domain = trace.names[unit].split("/")
            tenants = self.profile.backbones[backbone].tenants[domain]
            deadline = {"timeout": max(1, timeout_ns // 1000)} if timeout_ns else {}
            found.append(infer_request(backbone, [text], tenants[i % len(tenants)], outputs=("LABEL",), parameters=deadline))
        return found

    def warmed(self, servers: Servers, trace: Trace) -> float:
        """Lets servers learn their times, without deadlines. Returns a client's nanoseconds a request."""
        reports = [report for _, report in self.replayed(servers, trace.between(0, int(WARMING_S * 1e9)))]
        for report in reports:
            report.expect_success("the time of a client", "give --measured-seconds more")
        return 1e9 * sum(report.cpu_s for report in reports) / sum(len(report.statuses) for report in reports)

    def with_clients(self, client_ns: float) -> Profile:
        """Returns the profile of cores that the clients use too."""
        backbones = {
            name: replace(own, core=own.core + Terms(text_ns=client_ns)) for name, own in self.profile.backbones.items()
        }
        return replace(self.profile, backbones=backbones)


@contextmanager
def _two_cores(
    size: Size, dtype: EngineDtype, tenants: int, rounds: int, backbones: int, intra: str, domains: Sequence[str] = ()
) -> Generator[TwoCores]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise InvalidInput("this machine has one core, but the placements need two: measure on another one")
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder, on_cores(cores):
        yield TwoCores(Path(folder), size, dtype, tenants, rounds, backbones, intra, domains)


@contextmanager
def on_cores(cores: Sequence[int]) -> Generator[None]:
    """Keeps this thread, and the threads and processes that it starts, on these cores, as `taskset` would."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _profiled(repository: Path, file: Path, devices: Sequence[str], intra: str, rounds: int) -> Profile:
    command = [sys.executable, "-m", "hplm.cli.main", "place", "profile"]
    options = ["--devices", ",".join(devices), "--intra", intra, "--rounds", str(rounds), *["--wire"] * (rounds > 1)]
    done = subprocess.run([*command, "--repository", str(repository), *options, "--to", str(file)], stdout=STDERR)
    if done.returncode:
        raise Broken(f"`hplm place profile` ended with code {done.returncode}: see its messages above")
    return Profile.read(file)
