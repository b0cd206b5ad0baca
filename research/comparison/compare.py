"""`python -m research.comparison.compare`: all schemes under load, with few and with many tenants, on the same Triton.

The tenants of a scheme are copies of one. Their adapters and heads are pieces of one random pool, their whole models one file.
HMI's Fig. 11 and Table 2 are the scenario `saturate`, Fig. 3 `slowdown`, Fig. 12 `steady`, Fig. 13 `burst`: docs/loadtest.md.
With `--results DIR` each number is stored there, with the settings and the machine. The same command measures what is missing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.rows import ModelSize, Positive, Row, Rows, Seconds, Size, Whole, benchmark, expect_text, say
from bench.run import run
from bench.server import multiply, private_bytes, tenant_id, texts_of
from bench.turns import gflops, machine
from builder.publish.export import SCHEME as HPLM
from builder.publish.export import Exported, export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.adapters.layout import Layout
from hplm.engine.backbone import Backbone
from hplm.errors import HplmError, InvalidInput
from hplm.model.config import BackboneConfig
from hplm.server import TritonServer
from hplm.simulate.arrivals import SECOND, Arrivals
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import Report, send
from loadtest.traffic import Mix, burst, lengths_of, steady, until
from research.baselines.models import WholeConfig, files_of
from research.options import ended
from research.result_file import ResultFile
from research.schemes.export import FLAT, WHOLE, export_scheme
from testing.random_repository import LABELS
from testing.random_store import SIZES, random_store, random_tenants

COMPARED = (HPLM, *FLAT, "dedicated_inprocess", "compressed")
MB = 1e6
DEVICE_MB = 16_000.0  # the device of HMI's Table 2, which counts how many models fit
Scenario = Literal["saturate", "slowdown", "steady", "burst"]
DISTINCT = 4096  # different requests of `saturate`, more than are sent
CLIENTS = {"saturate": 16, "slowdown": 1, "steady": 512, "burst": 512}  # one for the slow-down, so that no request waits
CLOSED = ("saturate", "slowdown")  # a client waits for an answer before it sends the next request
BATCH_TOKENS, RANK = 1024, 32  # of every scheme
DTYPE = "fp32"  # of every scheme: whole models are stored so, and read into their place without a conversion
WARM_UP = 0.25  # share of the seconds
PERCENTS = (10, 25, 50, 75, 90, 95, 99)
LEAST, MANY = 4.0, 1000  # times as fast as dedicated models in one process, for so many tenants or more
WAY_OUT = "read the server's log or give more --patience, and then give the command again"


@dataclass(frozen=True)
class Comparison:
    """The settings that numbers must share to be compared. Schemes and numbers of asked tenants may differ."""

    scenario: Scenario
    size: Size
    known_tenants: int
    budget: int
    lengths: str
    seconds: float
    patience: float

    def mix(self, tenants: int) -> Mix:
        return Mix(tenants, lengths=lengths_of(self.lengths))


@benchmark(size="toy", tenants=(1, 5), schemes=("hplm", "dedicated_inprocess"), budget=2, lengths="12", seconds=0.5)
def compare(
    *,
    scenario: Scenario = "saturate",
    size: ModelSize = "bert-base",
    tenants: tuple[Whole, ...] = (1, 10, 100, 1000),
    schemes: tuple[str, ...] = COMPARED,
    budget: Whole = 20,
    lengths: str = "128",
    seconds: Seconds = 15.0,
    patience: Positive = 60.0,
    results: Path | None = None,
) -> Rows:
    """Measures what is missing, and shows all numbers.

    :param scenario: how requests arrive
    :param tenants: numbers of tenants; the server knows as many as the largest one
    :param schemes: schemes to measure
    :param budget: dedicated models in memory
    :param lengths: tokens of a text, or normal:MEAN,VARIANCE
    :param patience: seconds that an answer may take, and requests in flight after the end
    :param results: folder in which the numbers are kept, and found again by the same command
    """
    case = Comparison(scenario, size, max(tenants), budget, lengths, seconds, patience)
    for tokens in (case.mix(1).lengths.least, case.mix(1).lengths.most):
        expect_text(tokens, size, "lengths")
    if unknown := [scheme for scheme in schemes if scheme not in COMPARED]:
        raise InvalidInput(f"--schemes: unknown scheme {unknown[0]!r}: choose from {','.join(COMPARED)}")
    with tempfile.TemporaryDirectory(prefix="hplm-compare-") as scratch:
        kept = ResultFile((results or Path(scratch)) / f"{size}-{scenario}.jsonl")
        yield from rows_of_schemes(case, measured(case, tenants, schemes, kept, Path(scratch)))


def measured(
    case: Comparison, tenants: Sequence[int], schemes: Sequence[str], kept: ResultFile, work: Path
) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns the numbers by scheme and tenants. A failure stops no other measurement; it is raised at the end."""
    failed: list[str] = []
    found: dict[str, dict[int, dict[str, Any]]] = {}
    config, settings = SIZES[case.size], asdict(case) | {"dtype": DTYPE, "machine": machine()}
    for scheme in schemes:
        runs = {count: {"scheme": scheme, "tenants": count, "settings": settings} for count in tenants}
        missing = {count: one for count, one in runs.items() if kept.get(one) is None}
        if missing:
            say(f"{scheme}: exporting")
            options = ServingOptions(dtype=DTYPE, batch_tokens=max(BATCH_TOKENS, config.positions))
            store = random_tenant_store(work / "store", config, RANK)
            exported = export_compared(store, work / scheme, scheme, case.known_tenants, case.budget, options)
            with TritonServer(work / scheme) as server:
                for count, one in missing.items():
                    say(f"{scheme}: measuring {count} tenants")
                    try:
                        kept.put(one, under_load(case, scheme, server, count) | megabytes(exported))
                    except HplmError as error:
                        failed.append(str(error))
        found[scheme] = {count: result for count, one in runs.items() if (result := kept.get(one)) is not None}
    if failed:
        raise HplmError("\n".join(failed))
    return found


def under_load(case: Comparison, scheme: str, server: TritonServer, tenants: int) -> dict[str, Any]:
    """Returns the figures of one scheme behind a real Triton, for so many tenants."""

    def requests(arrivals: Arrivals) -> list[bytes]:
        texts = zip(texts_of(SIZES[case.size], arrivals.tokens), arrivals.tenant.tolist(), strict=True)
        return [infer_request(case.size, [text], tenant_id(tenant)) for text, tenant in texts]

    drawn = case.mix(tenants).draw(np.zeros(DISTINCT), None, np.random.default_rng(tenants))  # without a time
    warming = Load(server.http_url, requests(drawn), connections=CLIENTS[case.scenario], patience=case.patience)
    if case.scenario in CLOSED:
        load = replace(warming, seconds=case.seconds)
        send(replace(warming, seconds=WARM_UP * case.seconds))
    else:
        arrivals = until((steady if case.scenario == "steady" else burst)(case.mix(tenants)), case.seconds)
        if not len(arrivals):
            raise HplmError(f"{tenants} tenants send nothing in {case.seconds:g} s: give --seconds more")
        at = arrivals.at_ns / SECOND
        load = replace(warming, requests=requests(arrivals), seconds=float(at[-1]) + 1.0, arrivals=at)
        send(replace(warming, seconds=load.seconds, requests=warming.requests[: min(16, tenants)], count=16, connections=4))
    before = gflops()
    (report,) = send(load)
    if case.scenario in CLOSED:
        report.expect_success(f"{scheme} with {tenants} tenants", WAY_OUT)
    due = report.succeeded if load.due is None else len(load.due)
    return {
        "succeeded": report.succeeded,
        "failures": dict(report.failures),
        "p50_ms": round(report.percentile_ms(50), 3) if report.succeeded else None,
        "machine_gflops": round(min(before, gflops()), 1),  # less where the machine had other work
        "private_mb": round(private_bytes(server.pid) / MB, 1),
        "req_per_s": round(report.req_per_s, 4),  # four digits, because some schemes answer one request in ten seconds
        "answered": report.succeeded / due,
        "percentiles_ms": percentiles_ms(report, due),
    }


def percentiles_ms(report: Report, due: int) -> dict[int, float | None]:
    """Returns within how many milliseconds a share of the requests that were due was answered; None: it was not."""
    waits = np.full(due, np.inf)
    waits[: report.succeeded] = 1e3 * report.latencies[report.statuses == 200]
    found = np.percentile(waits, PERCENTS, method="higher").tolist()
    return {percent: ms if ms < np.inf else None for percent, ms in zip(PERCENTS, found, strict=True)}


def rows_of_schemes(case: Comparison, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Rows:
    rates = {scheme: {count: one["req_per_s"] for count, one in own.items()} for scheme, own in found.items()}
    for scheme, own in found.items():
        for count, one in own.items():
            yield Row(f"schemes/{scheme}/{count}", one["req_per_s"], "/s")
            yield Row(f"p50_ms/{scheme}/{count}", one["p50_ms"])
            yield Row(f"machine_gflops/{scheme}/{count}", one["machine_gflops"])
            if case.scenario == "slowdown":
                yield Row(f"slower/{scheme}/{count}", rates[scheme][min(own)] / one["req_per_s"])
            if case.scenario not in CLOSED:
                yield Row(f"answered/{scheme}/{count}", one["answered"])
            if case.scenario == "burst":
                for percent, ms in one["percentiles_ms"].items():
                    yield Row(f"answered within ms, by percent/{scheme} with {count:,} tenants/{percent}", ms)
    for scheme, own in found.items():
        for count, one in own.items():
            yield Row(f"memory/{scheme}/private_mb/{count}", one["private_mb"])
        last = own[max(own)]  # weights are the same for all numbers of tenants
        for name in ("shared", "each", "swapped", "mapped"):
            yield Row(f"memory/{scheme}/{name}_mb", round(last[name], 2))
        yield Row(f"memory/{scheme}/models_in_16_gb", last["models_in_16_gb"])
    if case.scenario == "saturate" and "hplm" in rates:
        ours = rates["hplm"]
        if (theirs := rates.get("dedicated_inprocess", {}).get(max(ours))) is not None:
            yield Row("ratios/hplm_to_inprocess", ours[max(ours)] / theirs, least=LEAST if max(ours) >= MANY else None)
        yield Row("ratios/hplm_most_to_least_tenants", ours[max(ours)] / ours[min(ours)])


def megabytes(exported: Exported) -> dict[str, float]:
    """Returns the megabytes of weights: `shared` once, `each` for a model that is ready, `swapped` for one that is not.

    `mapped` are tables on disk. `models_in_16_gb` counts as HMI: other models wait in host memory of the same size.
    """
    folder = exported.folder / "1"
    mapped = sum(file.stat().st_size for file in (folder / Backbone.TABLES).rglob("*") if file.is_file()) / MB
    if (folder / WholeConfig.FILE).exists():
        files = files_of(folder, WholeConfig.load(folder).tenants[0].weights)
        shared, each = 0.0, sum(file.stat().st_size for file in files) / MB
        swapped = each
    else:
        records = Snapshot.load(folder / Backbone.TENANTS).tenants[0].records()
        shared, each = (folder / Backbone.UPPER).stat().st_size / MB, 0.0
        swapped = sum(Layout.of(record.layout).weight_bytes for record in records) / MB
    fitting = int((DEVICE_MB - shared) / swapped)
    return {"shared": shared, "each": each, "swapped": swapped, "mapped": mapped, "models_in_16_gb": fitting}


def random_tenant_store(folder: Path, config: BackboneConfig, rank: int) -> Store:
    """Returns the store of random weights in `folder`, with one tenant. Makes it if it is not there."""
    return Store(folder) if folder.exists() else random_store(folder, config, random_tenants(1, rank, LABELS))


def export_compared(
    store: Store, repository: Path, scheme: str, tenants: int, budget: int, options: ServingOptions
) -> Exported:
    """Exports a store of one tenant in a scheme, into a folder that is replaced, and gives it more tenants."""
    shutil.rmtree(repository, ignore_errors=True)
    exported = (
        export(store, repository, options) if scheme == HPLM else export_scheme(store, repository, options, scheme, budget)
    )
    folder = exported.folder / "1"
    if scheme in WHOLE:
        whole = WholeConfig.load(folder)
        copies = tuple(replace(whole.tenants[0], id=tenant_id(number)) for number in range(tenants))
        replace(whole, tenants=copies).save(folder)
    else:
        multiply(folder, tenants).save(folder / Backbone.TENANTS)
    return exported


main = partial(ended, "compare", partial(run, "python -m research.comparison.compare", "research.comparison", "compare"))

if __name__ == "__main__":
    sys.exit(main())
