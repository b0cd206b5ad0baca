"""Sends a server far more requests than it can answer: how many it admits, answers in time and refuses, and how fast.

A closed loop measures the capacity. Then texts of one length with random deadlines arrive as a Poisson process at a multiple
of it. A second closed loop measures the capacity again, because machines drift; goodput is compared with the mean of both.
`admitted` are requests that were not refused on arrival. At the end, the simulator gets the same arrivals and the batch times
of the server's journal.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.measuring.serve import batch_texts, texts_of
from bench.overload import OverloadBench
from bench.serve import ServeBench
from bench.tools.processes import memory_of_server
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.engine.service import ANSWERING_NS
from hplm.scheduling.admission import REFUSED
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.simulation.arrivals import Arrivals
from hplm.scheduling.simulation.engines import one_stage
from hplm.scheduling.simulation.server import Machine, Simulation
from hplm.scheduling.waiting import Capacity
from hplm.server import TritonServer
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from loadtest.server_count import difference
from testing.random_store import SIZES, random_store, random_tenants

MOST_CONNECTIONS = 512
LOOKS = 8  # how often the server's memory is read
TARGETS = {"on_time_of_admitted": 0.9, "goodput_of_capacity": 0.9, "refusal_p99_ms": 20.0, "simulator_off_by": 0.03}
WARM = 20  # batches from which the simulated server learns before it starts, like the real one
MB = 1e6


@dataclass(frozen=True)
class Offered:
    """Requests of an open loop."""

    arrivals: np.ndarray  # seconds
    deadlines: np.ndarray  # seconds after the arrival


def bench_overload(case: OverloadBench) -> dict:
    case = replace(case, batch_texts=batch_texts(case.size, case.tokens, case.batch_texts))
    serve = ServeBench(case.size, case.tokens, case.tenants, case.seconds, connections=4 * case.batch_texts, dtype=case.dtype)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        repository, journal = Path(folder) / "repository", Path(folder) / "journal.jsonl"
        store = random_store(Path(folder) / "store", SIZES[case.size], random_tenants(case.tenants, 32, 4))
        options = ServingOptions(
            dtype=case.dtype,
            policy=DEFAULT if case.policy is None else case.policy,
            slots=max(2, 2 * case.tenants),
            batch_tokens=case.batch_texts * case.tokens,
            journal=str(journal),
        )
        backbone = export(store, repository, options).backbone
        with TritonServer(repository) as server:
            capacity = _capacity(server, backbone, serve)
            offered = _offer(case, capacity)
            print(
                f"capacity: {capacity:.1f} requests a second; sending {case.overload} times as many",
                file=sys.stderr,
                flush=True,
            )
            report, memory = _overload(server, backbone, serve, case, offered)
            after = _capacity(server, backbone, serve)
        entries = [json.loads(line) for line in journal.read_text("utf-8").splitlines()]
        batches = [Computed.of(entry) for entry in entries if "stages" in entry]
    by_server = sum(entry.get("outcome") == "on_time" for entry in entries)
    found = figures(report, offered, (capacity + after) / 2, case, by_server) | {"capacity_drift": round(after / capacity, 3)}
    simulated = simulate(offered, batches, case, options.policy)
    return found | {
        "simulated_on_time_of_offered": simulated,
        "simulator_off_by": round(abs(simulated - found["on_time_of_offered"]), 4),
        "memory_mb": [round(look / MB) for look in memory],
        "memory_growth": round(memory[-1] / memory[LOOKS // 4], 3),
        "case": asdict(case),
    }


@dataclass(frozen=True)
class Computed:
    """A batch of the journal."""

    tokens: int
    staging_s: float
    computing_s: float

    @classmethod
    def of(cls, entry: dict) -> Computed:
        took = {stage: end - start for stage, (start, end) in entry["stages"].items()}
        computing = took.pop("compute")
        return cls(entry["tokens"], sum(took.values()), computing)


def simulate(offered: Offered, batches: list[Computed], case: OverloadBench, given: str) -> float:
    """Returns the share of the offered requests that the simulated server answers in time."""
    tokens, seconds = (np.array([getattr(batch, name) for batch in batches]) for name in ("tokens", "computing_s"))
    slope, base = np.polyfit(tokens, seconds, 1) if np.ptp(tokens) else (0.0, float(seconds.mean()))
    texts, room = len(offered.arrivals), case.batch_texts * case.tokens
    full = seconds[tokens == tokens.max()]
    machine = Machine(
        one_stage(lambda lengths, places: 1e9 * (base + slope * float(lengths.sum()))),
        Capacity(room, room, room),
        staging_ns=round(1e9 * float(np.median([batch.staging_s for batch in batches]))),
        answering_ns=ANSWERING_NS,
        noise=float(full.std() / full.mean()),
    )
    scheduler = Scheduler(policy(given), Limits(texts, texts * 10**6), admission=True, answering_ns=ANSWERING_NS)
    for batch in batches[:WARM]:
        scheduler.costs[0].observe(batch.tokens, round(batch.tokens / case.tokens), 0, round(1e9 * batch.computing_s))
    arrivals = Arrivals(
        at_ns=(offered.arrivals * 1e9).astype(np.int64),
        tokens=np.full(texts, case.tokens),
        allowed_ns=(offered.deadlines * 1e9).astype(np.int64),
        tenant=np.arange(texts) % case.tenants,
        priority=np.zeros(texts, dtype=np.int64),
    )
    return round(float(Simulation(scheduler, machine, arrivals, case.seed).run().on_time.mean()), 4)


def figures(report: Report, offered: Offered, capacity: float, case: OverloadBench, by_server: int) -> dict:
    """`by_server`: how many requests the server counted as on time. All other figures are by the client's clock."""
    served = report.statuses == 200
    refused = np.array([REFUSED.encode() in body for body in report.bodies], dtype=bool)
    on_time = served & (report.latencies <= offered.deadlines[report.numbers])
    admitted = int((~refused).sum()) + report.errors.total()
    span = offered.arrivals[-1] - offered.arrivals[0]
    return {
        "capacity_req_per_s": round(capacity, 2),
        "offered_req_per_s": round(len(offered.arrivals) / span, 2),
        "batch_ms": round(case.batch_texts / capacity * 1e3, 1),
        "on_time_of_admitted": round(float(on_time.sum()) / max(1, admitted), 4),
        "goodput_of_capacity": round(float(on_time.sum()) / report.wall_s / capacity, 4),
        "on_time_of_offered": round(float(on_time.sum()) / len(offered.arrivals), 4),
        "on_time": int(on_time.sum()),
        "on_time_by_server": by_server,
        "server_counts_more": round(difference(int(on_time.sum()), by_server), 4),
        "refused": int(refused.sum()),
        "dropped_later": int((~served & ~refused).sum()),
        "late": int((served & ~on_time).sum()),
        "unanswered": report.errors.total(),
        "refusal_p50_ms": _percentile_ms(report.latencies[refused], 50),
        "refusal_p99_ms": _percentile_ms(report.latencies[refused], 99),
        "targets": TARGETS,
    }


def _percentile_ms(latencies: np.ndarray, percent: float) -> float | None:
    return round(float(np.percentile(latencies, percent)) * 1e3, 2) if len(latencies) else None


def _capacity(server: TritonServer, backbone: str, serve: ServeBench) -> float:
    host, port = server.http_url.split(":")
    requests = _requests(backbone, serve, None)
    (report,) = send(Load(host, int(port), requests, seconds=serve.seconds / 6, connections=serve.connections))  # warms up
    (report,) = send(Load(host, int(port), requests, seconds=serve.seconds / 3, connections=serve.connections))
    report.expect_success("the capacity")
    return report.req_per_s


def _offer(case: OverloadBench, capacity: float) -> Offered:
    generator = np.random.default_rng(case.seed)
    count = round(case.seconds * case.overload * capacity)
    batch = case.batch_texts / capacity
    return Offered(
        np.cumsum(generator.exponential(1 / (case.overload * capacity), count)),
        generator.uniform(case.deadlines[0] * batch, case.deadlines[1] * batch, count),
    )


def _requests(backbone: str, serve: ServeBench, deadlines: np.ndarray | None) -> list[bytes]:
    texts, width = texts_of(serve), len(str(serve.tenants - 1))
    timeouts = [{}] * len(texts) if deadlines is None else [{"timeout": round(float(one) * 1e6)} for one in deadlines]
    return [
        infer_request(
            backbone, [texts[i % len(texts)]], f"tenant-{i % serve.tenants:0{width}d}", outputs=("LABEL",), parameters=timeout
        )
        for i, timeout in enumerate(timeouts)
    ]


def _overload(
    server: TritonServer, backbone: str, serve: ServeBench, case: OverloadBench, offered: Offered
) -> tuple[Report, list[int]]:
    host, port = server.http_url.split(":")
    load = Load(
        host,
        int(port),
        _requests(backbone, serve, offered.deadlines),
        seconds=float(offered.arrivals[-1]) + 1.0,
        connections=MOST_CONNECTIONS,
        arrivals=offered.arrivals,
        keep_bodies=True,
    )
    memory: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(case.seconds / LOOKS):
            memory.append(memory_of_server(server).private)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        return send(load)[0], memory
    finally:
        over.set()
        looking.join()
