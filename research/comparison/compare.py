"""Measures one scenario for all schemes and several numbers of tenants, on the same Triton, with the native generator.

    python -m research.comparison.compare --tenants 1,10,100,1000 --json  throughput (HMI's Fig. 11), memory (Table 2)
    python -m research.comparison.compare --scenario slowdown --tenants 1,10,100,1000  what swapping models costs (Fig. 3)
    python -m research.comparison.compare --scenario steady --tenants 10,100,1000,10000  response times (Fig. 12)
    python -m research.comparison.compare --scenario burst --tenants 100,1000,10000  their distribution (Fig. 13)

Each number is stored under `--results`. After an interruption, give the same command again: it measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.machine import gflops, machine
from bench.options import DTYPES, SIZE_NAMES, expect_above_zero, expect_text, whole_numbers
from bench.server import tenant_id
from hplm.errors import HplmError
from hplm.scheduling.simulation.arrivals import SECOND, Arrivals
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from loadtest.traffic import Mix, burst, lengths_of, steady, texts_for, until
from research.comparison.results import Results
from research.comparison.served_schemes import (
    COMPARED,
    DISK,
    ExportedScheme,
    Served,
    Setup,
    export_compared,
    served,
    weight_megabytes,
)
from testing.random_store import words

SCENARIOS = ("saturate", "slowdown", "steady", "burst")
CLOSED = ("saturate", "slowdown")  # a client waits for an answer before it sends the next request
DISTINCT = 4096  # different requests of `saturate`, more than are sent
WARM_UP = 0.25  # share of the seconds
OPEN_CONNECTIONS = 512  # in scenarios that do not wait for answers
PERCENTS = np.arange(0, 101)
TARGETS = {"hplm_to_dedicated_at_least_tenants": 1.8, "hplm_to_dedicated_at_most_tenants": 100.0, "hplm_to_inprocess": 4.0}


@dataclass(frozen=True)
class Comparison:
    scenario: str = "saturate"
    setup: Setup = field(default_factory=Setup)
    tenants: tuple[int, ...] = (1, 10, 100, 1000)
    schemes: tuple[str, ...] = COMPARED
    lengths: str = "128"
    seconds: float = 15.0
    connections: int = 16
    patience: float = 60.0  # seconds after the end, for requests in flight

    def __post_init__(self) -> None:
        expect_above_zero(seconds=self.seconds, connections=self.connections, patience=self.patience)
        expect_above_zero(budget=self.setup.budget, batch_tokens=self.setup.batch_tokens)
        lengths = lengths_of(self.lengths)
        for tokens in (lengths.least, lengths.most):
            expect_text(tokens, self.setup.config.positions, "lengths")

    @property
    def clients(self) -> int:
        """The number of clients at a time. For the slow-down it is one, so that no request waits for another one."""
        return 1 if self.scenario == "slowdown" else self.connections

    def settings(self) -> dict:
        """Returns the settings that numbers must share to be compared. Schemes and numbers of asked tenants may differ."""
        mine, setup = asdict(self), asdict(self.setup)  # `setup` has the number of tenants that the server knows
        del mine["tenants"], mine["schemes"]
        return mine | {"connections": self.clients, "setup": setup, "machine": machine()}


def compare(case: Comparison, results: Results, work: Path) -> dict:
    """Measures missing numbers, and returns all of them. A failure stops no other measurement; it is raised at the end."""
    failed: list[str] = []
    total = len(case.schemes) * len(case.tenants)
    with tqdm(total=total, desc=case.scenario, unit="number", file=sys.stderr) as progress:
        for scheme in case.schemes:
            missing = [tenants for tenants in case.tenants if results.get(scheme, tenants) is None]
            progress.update(len(case.tenants) - len(missing))
            if not missing:
                continue
            progress.set_postfix_str(f"{scheme}: exporting")
            exported = export_compared(work, scheme, case.setup)
            with ExitStack() as stack:
                progress.set_postfix_str(f"{scheme}: starting")
                server = stack.enter_context(served(exported))
                for tenants in missing:
                    progress.set_postfix_str(f"{scheme}, {tenants} tenants")
                    try:
                        results.put(scheme, tenants, _measure(server, case, tenants))
                    except HplmError as error:
                        failed.append(str(error))
                    progress.update()
    if failed:
        raise HplmError("\n".join(failed))
    return summary(results)


def _measure(server: Served, case: Comparison, tenants: int) -> dict:
    host, port = server.url_for(tenants).split(":")
    if case.scenario in CLOSED:
        requests = _requests(server.exported, tenants, _uniform(case, tenants))
        load = Load(host, int(port), requests, case.seconds, connections=case.clients, patience=case.patience)
        warm = server.loaded_of(tenants)  # loading models would take longer than the whole warm-up
        warming = requests if warm == tenants else _requests(server.exported, warm, _uniform(case, warm))
        send(replace(load, requests=warming, seconds=WARM_UP * case.seconds))
    else:
        arrivals = _scheduled(case, tenants)
        warming = _requests(server.exported, tenants, until(_uniform(case, tenants), 1.0))
        send(Load(host, int(port), warming[: min(16, tenants)], count=16, connections=4, patience=case.patience))
        load = Load(
            host,
            int(port),
            _requests(server.exported, tenants, arrivals),
            seconds=float(arrivals.at_ns[-1]) / SECOND + 1.0,
            connections=OPEN_CONNECTIONS,
            arrivals=arrivals.at_ns / SECOND,
            patience=case.patience,
        )
    before, speeds = server.loads, [gflops()]
    (report,) = send(load)
    if case.scenario in CLOSED:
        way_out = "read the server's log or give more --patience, and then give the command again"
        report.expect_success(f"{server.exported.scheme} with {tenants} tenants", way_out)
    speeds.append(gflops())
    measured = (
        _figures(report, load)
        | asdict(weight_megabytes(server.exported))
        | {
            "models_in_16_gb": weight_megabytes(server.exported).models_in_16_gb,
            "machine_gflops": [round(speed, 1) for speed in speeds],  # before and after, to show whether the machine is steady
            "known_tenants": case.setup.tenants,
            "private_mb": round(server.private_mb(), 1),
        }
    )
    if before is not None and (after := server.loads) is not None:
        measured["loads"] = after - before
    return measured


def _figures(report: Report, load: Load) -> dict:
    good = report.latencies[report.statuses == 200]
    due = load.due
    return report.summary() | {
        "req_per_s": round(report.req_per_s, 4),  # four digits, because some schemes answer one request in ten seconds
        "offered": len(due) if due is not None else None,
        "offered_req_per_s": round(len(due) / load.seconds, 2) if due is not None else None,
        "latency_ms": [round(float(value) * 1e3, 2) for value in np.percentile(good, PERCENTS)] if len(good) else [],
    }


def _uniform(case: Comparison, tenants: int) -> Arrivals:
    mix = Mix(tenants, lengths=lengths_of(case.lengths))
    return mix.draw(np.zeros(DISTINCT), None, np.random.default_rng(tenants))


def _scheduled(case: Comparison, tenants: int) -> Arrivals:
    mix = Mix(tenants, lengths=lengths_of(case.lengths))
    return until((steady if case.scenario == "steady" else burst)(mix), case.seconds)


def _requests(exported: ExportedScheme, tenants: int, arrivals: Arrivals) -> list[bytes]:
    texts = texts_for(arrivals.tokens.tolist(), words(exported.setup.config.vocabulary))
    return [
        infer_request(exported.model(tenant), [text], tenant_id(tenant), outputs=("LABEL", "SCORE"))
        for text, tenant in zip(texts, arrivals.tenant.tolist(), strict=True)
    ]


def summary(results: Results) -> dict:
    rates: dict[str, dict[str, float]] = {}
    memory: dict[str, dict] = {}
    p50: dict[str, dict[str, float | None]] = {}
    for scheme, tenants, measured in results.all():
        rates.setdefault(scheme, {})[str(tenants)] = measured["req_per_s"]
        p50.setdefault(scheme, {})[str(tenants)] = measured["p50_ms"]
        kept = ("shared", "each", "swapped", "mapped")
        memory.setdefault(scheme, {f"{name}_mb": round(measured[name], 2) for name in kept})
        memory[scheme]["models_in_16_gb"] = measured["models_in_16_gb"]
        memory[scheme].setdefault("private_mb", {})[str(tenants)] = measured["private_mb"]
    settings = results.settings()
    speeds = [speed for _, _, measured in results.all() for speed in measured["machine_gflops"]]
    return {
        "schemes": rates,
        "p50_ms": p50,
        "memory": memory,
        "ratios": _ratios(rates) if settings["scenario"] == "saturate" else {},
        "targets": TARGETS,
        "settings": settings,
        "machine_gflops": {"least": min(speeds), "median": statistics.median(speeds), "most": max(speeds)} if speeds else None,
    }


def _ratios(rates: dict[str, dict[str, float]]) -> dict[str, float | None]:
    counts = sorted(map(int, rates.get("hplm", {})))
    if not counts:
        return {}
    least, most = str(counts[0]), str(counts[-1])

    def ratio(over: str, tenants: str) -> float | None:
        below = rates.get(over, {}).get(tenants)
        return round(rates["hplm"][tenants] / below, 2) if below else None

    return {
        "hplm_to_dedicated_at_least_tenants": ratio("dedicated", least),
        "hplm_to_dedicated_at_most_tenants": ratio("dedicated", most),
        "hplm_to_inprocess": ratio("dedicated_inprocess", most),
        "hplm_to_inprocess_from_disk": ratio(DISK, most),
        "hplm_most_to_least_tenants": round(rates["hplm"][most] / rates["hplm"][least], 3) if rates["hplm"][least] else None,
    }


def table(figures: dict) -> str:
    counts = sorted({int(count) for rates in figures["schemes"].values() for count in rates})
    shown = "schemes" if figures["settings"]["scenario"] in CLOSED else "p50_ms"
    lines = ["requests a second" if shown == "schemes" else "response time, median, ms"]
    lines.append(f"{'tenants':28}" + "".join(f"{count:>10}" for count in counts))
    for scheme in (scheme for scheme in COMPARED if scheme in figures[shown]):
        row = [figures[shown][scheme].get(str(count)) for count in counts]
        lines.append(f"{scheme:28}" + "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in row))
    for name, value in figures["ratios"].items():
        target = figures["targets"].get(name)
        lines.append(f"{name}: {value}" + (f" (target {target})" if target else ""))
    speed = figures["machine_gflops"]
    lines.append(f"bare matrix products before and after each number: {speed['least']} to {speed['most']} GFLOP/s")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="research.comparison.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="saturate", help="how requests arrive (default: %(default)s)")
    parser.add_argument("--size", choices=SIZE_NAMES, default="bert-base", help="size of the model (default: %(default)s)")
    parser.add_argument(
        "--tenants", type=whole_numbers, default=[1, 10, 100, 1000], help="numbers of tenants (default: 1,10,100,1000)"
    )
    parser.add_argument("--schemes", default=",".join(COMPARED), help="schemes to measure (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=20, help="dedicated models in memory (default: %(default)s)")
    parser.add_argument("--lengths", default="128", help="tokens of a text, or normal:MEAN,VARIANCE (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each measurement (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=16, help="connections of saturate (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=1024, help="most tokens in a batch, in every scheme (default: %(default)s)"
    )
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that an answer may take (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the engine (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder for the numbers (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder for the repositories (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    given = parser.parse_args(arguments)
    setup = Setup(given.size, max(given.tenants), given.budget, given.batch_tokens, given.dtype)
    schemes = tuple(given.schemes.split(","))
    if unknown := [scheme for scheme in schemes if scheme not in COMPARED]:
        parser.error(f"--schemes: unknown scheme {unknown[0]!r}: choose from {','.join(COMPARED)}")
    measured = (given.lengths, given.seconds, given.connections, given.patience)
    try:
        case = Comparison(given.scenario, setup, tuple(given.tenants), schemes, *measured)
        figures = run(case, given.results, given.work)
    except HplmError as error:
        sys.exit(str(error))
    print(json.dumps(figures) if given.json else table(figures))


def run(case: Comparison, results: Path, work: Path | None = None) -> dict:
    size = case.setup.config.name
    with ExitStack() as stack:
        if work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hplm-compare-")))
        return compare(case, Results.open(results / f"{size}-{case.scenario}", case.settings()), work)


if __name__ == "__main__":
    main()
