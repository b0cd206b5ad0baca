"""Measures one scenario for all schemes and several numbers of tenants, on the same Triton.

    python -m research.comparison.compare --tenants 1,10,100,1000 --json  throughput (HMI's Fig. 11), memory (Table 2)
    python -m research.comparison.compare --scenario slowdown --tenants 1,10,100,1000  what swapping models costs (Fig. 3)
    python -m research.comparison.compare --scenario steady --tenants 10,100,1000,10000  response times (Fig. 12)
    python -m research.comparison.compare --scenario burst --tenants 100,1000,10000  their distribution (Fig. 13)

Each number is stored under `--results`, with the settings and the machine. After an interruption, give the same command again:
it measures what is missing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from bench.machine import gflops, machine
from bench.rows import Positive, Size, Whole, expect_text, say
from bench.run import app_of
from bench.server import private_bytes, tenant_id, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from hplm.server import TritonServer
from hplm.simulate.arrivals import SECOND, Arrivals
from loadtest.encode import infer_request
from loadtest.generator import Load
from loadtest.load import send
from loadtest.traffic import Mix, burst, lengths_of, steady, until
from research.comparison.report import Numbers, described, numbers_in, summary
from research.comparison.schemes import COMPARED, MB, export_compared, megabytes, random_tenant_store
from research.options import FLAT, JSON
from research.options import run as run_command
from research.result_file import ResultFile
from testing.random_store import SIZES

app = app_of("python -m research.comparison.compare", __doc__)
Scenario = Literal["saturate", "slowdown", "steady", "burst"]
DISTINCT = 4096  # different requests of `saturate`, more than are sent
OPEN_CONNECTIONS = 512  # in scenarios that do not wait for answers
WARM_UP = 0.25  # share of the seconds
PERCENTS = np.arange(0, 101)
WAY_OUT = "read the server's log or give more --patience, and then give the command again"


@dataclass(frozen=True)
class Comparison:
    scenario: Scenario = "saturate"
    "How requests arrive."
    size: Size = "bert-base"
    "Size of the model."
    tenants: tuple[Whole, ...] = (1, 10, 100, 1000)
    "Numbers of tenants. The server knows as many as the largest one."
    schemes: tuple[str, ...] = COMPARED
    "Schemes to measure."
    budget: Whole = 20
    "Dedicated models in memory."
    lengths: str = "128"
    "Tokens of a text, or normal:MEAN,VARIANCE."
    seconds: Positive = 15.0
    "Seconds of each measurement."
    connections: Whole = 16
    "Connections of saturate."
    batch_tokens: Whole = 1024
    "Most tokens in a batch, in every scheme."
    patience: Positive = 60.0
    "Seconds that an answer may take, and requests in flight after the end."
    dtype: str = "auto"
    "Precision of the engine."
    rank: Whole = 32
    "Rank of the adapters."

    def __post_init__(self) -> None:
        for tokens in (self.mix(1).lengths.least, self.mix(1).lengths.most):
            expect_text(tokens, self.size, "lengths")
        if unknown := [scheme for scheme in self.schemes if scheme not in COMPARED]:
            raise InvalidInput(f"--schemes: unknown scheme {unknown[0]!r}: choose from {','.join(COMPARED)}")

    @property
    def is_closed(self) -> bool:
        """Whether a client waits for an answer before it sends the next request."""
        return self.scenario in ("saturate", "slowdown")

    @property
    def clients(self) -> int:
        """The number of clients at a time. For the slow-down it is one, so that no request waits for another one."""
        return {"slowdown": 1, "saturate": self.connections}.get(self.scenario, OPEN_CONNECTIONS)

    def mix(self, tenants: int) -> Mix:
        return Mix(tenants, lengths=lengths_of(self.lengths))

    def settings(self) -> dict[str, Any]:
        """Returns the settings that numbers must share to be compared. Schemes and numbers of asked tenants may differ."""
        clients = 1 if self.scenario == "slowdown" else self.connections
        mine = asdict(self) | {"connections": clients, "known_tenants": max(self.tenants), "machine": machine()}
        return {name: value for name, value in mine.items() if name not in ("tenants", "schemes")}


USUAL = Comparison()
QUICK = Comparison(
    size="toy", tenants=(1, 5), schemes=("hplm", "dedicated_inprocess"), budget=2, lengths="12", seconds=0.5, connections=3,
    batch_tokens=64, dtype="fp32", rank=4,
)  # fmt: skip


def run(case: Comparison, results: Path, work: Path) -> Numbers:
    """Measures missing numbers. A failure stops no other measurement; it is raised at the end."""
    kept, settings, failed = ResultFile(results / f"{case.size}-{case.scenario}.jsonl"), case.settings(), []
    config = SIZES[case.size]
    options = ServingOptions(dtype=case.dtype, batch_tokens=max(case.batch_tokens, config.positions))
    for scheme in case.schemes:
        runs = {tenants: {"scheme": scheme, "tenants": tenants, "settings": settings} for tenants in case.tenants}
        missing = {tenants: one for tenants, one in runs.items() if kept.get(one) is None}
        if not missing:
            continue
        say(f"{scheme}: exporting")
        store = random_tenant_store(work / f"store-{case.size}-{case.rank}", config, case.rank)
        exported = export_compared(store, work / scheme, scheme, max(case.tenants), case.budget, options)
        with TritonServer(work / scheme) as server:
            for tenants, one in missing.items():
                say(f"{scheme}: measuring {tenants} tenants")
                try:
                    kept.put(one, measured(case, scheme, server, tenants) | megabytes(exported))
                except HplmError as error:
                    failed.append(str(error))
    if failed:
        raise HplmError("\n".join(failed))
    return next(one for one in numbers_in(kept) if one.settings == settings)


def measured(case: Comparison, scheme: str, server: TritonServer, tenants: int) -> dict[str, Any]:
    """Returns the figures of one scheme behind a real Triton, for so many tenants."""

    def requests(arrivals: Arrivals) -> list[bytes]:
        texts = zip(texts_of(SIZES[case.size], arrivals.tokens), arrivals.tenant.tolist(), strict=True)
        return [infer_request(case.size, [text], tenant_id(tenant)) for text, tenant in texts]

    drawn = case.mix(tenants).draw(np.zeros(DISTINCT), None, np.random.default_rng(tenants))  # without a time
    warming = Load(server.http_url, requests(drawn), connections=case.clients, patience=case.patience)
    if case.is_closed:
        load = replace(warming, seconds=case.seconds)
        send(replace(warming, seconds=WARM_UP * case.seconds))
    else:
        arrivals = until((steady if case.scenario == "steady" else burst)(case.mix(tenants)), case.seconds)
        at = arrivals.at_ns / SECOND
        load = replace(warming, requests=requests(arrivals), seconds=float(at[-1]) + 1.0, arrivals=at)
        send(replace(warming, seconds=load.seconds, requests=warming.requests[: min(16, tenants)], count=16, connections=4))
    before = gflops()
    (report,) = send(load)
    if case.is_closed:
        report.expect_success(f"{scheme} with {tenants} tenants", WAY_OUT)
    good, due = report.latencies[report.statuses == 200], load.due
    return report.summary() | {
        "machine_gflops": [round(speed, 1) for speed in (before, gflops())],  # whether the machine is steady
        "known_tenants": max(case.tenants),
        "private_mb": round(private_bytes(server.pid) / MB, 1),
        "req_per_s": round(report.req_per_s, 4),  # four digits, because some schemes answer one request in ten seconds
        "offered": len(due) if due is not None else None,
        "offered_req_per_s": round(len(due) / load.seconds, 2) if due is not None else None,
        "latency_ms": [round(float(value) * 1e3, 2) for value in np.percentile(good, PERCENTS)] if len(good) else [],
    }


@app.default
def compare(
    *,
    case: Annotated[Comparison, FLAT] = USUAL,
    results: Path = Path("results"),
    work: Path | None = None,
    quick: bool = False,
    as_json: Annotated[bool, JSON] = False,
) -> int:
    """Measures what is missing, and prints all numbers. Ends with 1 if a ratio misses its target.

    :param results: folder for the numbers
    :param work: folder for the repositories, which is kept (default: a temporary folder)
    :param quick: measure little, with a toy: the figures mean nothing, and are not kept
    :param as_json: end with one line of JSON
    """
    with tempfile.TemporaryDirectory(prefix="hplm-compare-") as scratch:
        if quick:
            case, results = replace(QUICK, scenario=case.scenario), Path(scratch)
        kept = run(case, results, work or Path(scratch))
    found = summary(kept)
    print(json.dumps(found) if as_json else described(kept))
    return int(bool(found["missed"]))


main = partial(run_command, app)

if __name__ == "__main__":
    sys.exit(main())
