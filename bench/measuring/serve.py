"""Measures a real server with random weights beside the bare engine: one text at a time, and at saturation.

The engine is measured in a process of its own, before the server starts and after it has stopped. So neither takes the other's
cores, and `engine_drift` shows whether the machine has changed its speed.

The same server has an ensemble of two models that do nothing. Processor time that both need, the engine's and the noop
ensemble's, bounds what a server could answer: `bound_req_per_s` is 1 / (1 / engine + 1 / noop).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bench.measuring.noop import NOOP, add_noops
from bench.serve import ServeBench
from bench.tools.wrk import Wrk, load_by_wrk
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.engine.engine import INT8, Engine, resolve_device, resolve_precision
from hplm.engine.lookup import Lookup
from hplm.engine.request import Request, Text
from hplm.engine.staging import Stager, StagingSettings
from hplm.errors import HplmError
from hplm.server import TritonServer
from hplm.tenants.ticket import Ticket
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from testing.random_store import SIZES, random_store, random_tenants, words

BATCH_TOKENS = 4096


def bench_serve(case: ServeBench) -> dict:
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        repository = Path(folder) / "repository"
        store = random_store(Path(folder) / "store", SIZES[case.size], random_tenants(case.tenants, case.rank, 4))
        options = ServingOptions(dtype=case.dtype, slots=max(2, 2 * case.tenants), batch_tokens=BATCH_TOKENS)
        backbone = export(store, repository, options).backbone
        requests = tenant_requests(backbone, texts_of(case), case)
        noops = tenant_requests(NOOP, texts_of(case), case)
        before = _engine_apart(repository, backbone, case)
        add_noops(repository, case.tokens)
        with TritonServer(repository) as server:
            alone, saturated = load_server(server.http_url, requests, requests, case)
            noop_alone, noop_saturated = load_server(server.http_url, noops, noops, case)
            by_wrk = load_by_wrk(server.http_url, requests, case.connections, case.seconds) if case.wrk else None
        after = _engine_apart(repository, backbone, case)
    engine_p50 = (before["p50_ms"] + after["p50_ms"]) / 2
    engine_rate = (before["texts_per_s"] + after["texts_per_s"]) / 2
    bound = 1 / (1 / engine_rate + 1 / noop_saturated.req_per_s)
    added, noop_p50 = alone.percentile_ms(50) - engine_p50, noop_alone.percentile_ms(50)
    return {
        "p50_ms": round(alone.percentile_ms(50), 3),
        "p99_ms": round(alone.percentile_ms(99), 3),
        "engine_p50_ms": round(engine_p50, 3),
        "req_per_s": round(saturated.req_per_s, 2),
        "engine_req_per_s": round(engine_rate, 2),
        "added_ms": round(added, 3),
        "share_of_engine": round(saturated.req_per_s / engine_rate, 3),
        "noop_p50_ms": round(noop_p50, 3),
        "added_over_noop_ms": round(added - noop_p50, 3),
        "noop_req_per_s": round(noop_saturated.req_per_s, 2),
        "bound_req_per_s": round(bound, 2),
        "share_of_bound": round(saturated.req_per_s / bound, 3),
        **(_beside_wrk(by_wrk, saturated) if by_wrk else {}),
        "engine_drift": round(after["texts_per_s"] / before["texts_per_s"], 3),
        "generator_cpu_share": round(saturated.cpu_s / saturated.wall_s, 4),
        "case": asdict(case),
        "dtype": before["dtype"],
        "threads": before["threads"],
    }


def _beside_wrk(by_wrk: Wrk, ours: Report) -> dict:
    return {
        "wrk_req_per_s": by_wrk.req_per_s,
        "wrk_p50_ms": by_wrk.p50_ms,
        "generator_over_wrk": round(ours.req_per_s / by_wrk.req_per_s, 3),
    }


def texts_of(case: ServeBench) -> list[str]:
    """Returns texts whose words follow Zipf's law. With the two special tokens, each text has exactly `case.tokens` tokens."""
    generator = np.random.default_rng(7)
    vocabulary = words(SIZES[case.size].vocabulary)
    weights = 1 / np.arange(1, len(vocabulary) + 1)
    numbers = generator.choice(len(vocabulary), (4 * case.connections, case.tokens - 2), p=weights / weights.sum())
    return [" ".join(vocabulary[number] for number in row) for row in numbers]


def batch_texts(size: str, tokens: int, asked: int) -> int:
    """Returns the number of texts of a batch, more than `asked` for short texts: a batch must fit the model's longest text."""
    return max(asked, -(-SIZES[size].positions // tokens))


def tenant_requests(backbone: str, texts: list[str], case: ServeBench) -> list[bytes]:
    """Returns a request for each text, to the tenants in turn."""
    width = len(str(case.tenants - 1))
    return [
        infer_request(backbone, [text], f"tenant-{i % case.tenants:0{width}d}", outputs=("LABEL", "SCORE"))
        for i, text in enumerate(texts)
    ]


def load_server(url: str, requests: list[bytes], warming: list[bytes], case: ServeBench) -> tuple[Report, Report]:
    """Returns the reports of one connection, and then of all connections."""
    host, port = url.split(":")
    reports = []
    for connections in (1, case.connections):
        send(Load(host, int(port), warming, seconds=case.seconds / 4, connections=connections))
        print(f"measuring {connections} connections for {case.seconds:.0f} s", file=sys.stderr, flush=True)
        (report,) = send(Load(host, int(port), requests, seconds=case.seconds, connections=connections))
        report.expect_success(f"{connections} connections")
        reports.append(report)
    return reports[0], reports[1]


def _engine_apart(repository: Path, backbone: str, case: ServeBench) -> dict:
    command = [sys.executable, "-m", "bench.measuring.serve", str(repository / backbone / "1"), json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=600 + 2 * case.seconds)
    if done.returncode:
        raise HplmError(f"the process that measures the engine ended with code {done.returncode}: see its messages above")
    return json.loads(done.stdout)


def measure_engine(folder: Path, case: ServeBench) -> dict:
    """Measures only staging and computing, without threads, queue or server: one text, and the best batch size."""
    backbone = Backbone(folder)
    device = resolve_device("auto")
    precision = resolve_precision(case.dtype, device)
    engine = Engine(backbone.upper(), device, precision.dtype, precision.eight_bits)
    slots, few_sizes = max(2, 2 * case.tenants), engine.takes_few_sizes
    stager = Stager(backbone, StagingSettings(slots, device, precision.dtype, few_sizes=few_sizes))
    lookup = Lookup(backbone)
    snapshot, texts = backbone.view.snapshot, []
    for i, text in enumerate(texts_of(case)):
        tenant = snapshot.tenants[i % case.tenants]
        found = lookup.resolve(backbone.view, tenant, [text], None, False)
        ticket = Ticket(snapshot.export_number, snapshot.generation, tenant.uid, tenant.version, 0, 0, 0, 0)
        texts += Request(ticket, backbone.view, tenant, 1, lambda request, answer: None).texts_from(found)

    def seconds_of(count: int) -> float:
        times = []
        end = time.perf_counter() + case.seconds / 8
        batches = cycle([texts[i : i + count] for i in range(0, len(texts) - count + 1, count)])
        while time.perf_counter() < end or len(times) < 6:
            start = time.perf_counter()
            batch = stager.stage(next(batches), broken=_raise)
            assert batch is not None  # or `_raise` has raised
            list(engine.run(batch))
            times.append(time.perf_counter() - start)
            stager.release(batch.held)
        return float(np.median(times[1:]))

    alone = seconds_of(1)
    largest = min(BATCH_TOKENS // case.tokens, len(texts))
    counts = sorted({count for count in (2, 4, 8, 16, 32, 64, 128) if count < largest} | {largest})
    rates = {count: count / seconds_of(count) for count in tqdm(counts, desc="bare engine, batch sizes")}
    return {
        "p50_ms": alone * 1e3,
        "texts_per_s": max(*rates.values(), 1 / alone),
        "dtype": INT8 if precision.eight_bits else str(precision.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _raise(text: Text, error: Exception) -> None:
    raise error


if __name__ == "__main__":
    print(json.dumps(measure_engine(Path(sys.argv[1]), ServeBench(**json.loads(sys.argv[2])))))
