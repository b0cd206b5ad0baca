"""Measures the served path around an engine that computes next to nothing, beside ensembles of two models that do nothing.

All ensembles are models of one server, and are measured in turn, so that all see the same machine.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.glue import GlueBench
from bench.measuring.grpc_load import GrpcLoad
from bench.measuring.noop import FLOOR, NOOP, add_noops
from bench.measuring.processor_time import processor_seconds
from bench.measuring.serve import texts_of
from bench.serve import ServeBench
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from loadtest.encode import infer_request
from loadtest.load import Load, Report, send
from testing.random_store import MINILM, random_store, random_tenants

NULL = replace(MINILM, name="null", hidden=32, heads=2, intermediate=64, lower_layers=1, upper_layers=1)
SHAPES = ((1, 1), (64, 1), (256, 1), (64, 16), (64, 64))  # clients and texts of a request
REQUESTS = 256  # different ones, sent in turn


def bench_glue(case: GlueBench) -> dict:
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        repository = Path(folder) / "repository"
        store = random_store(Path(folder) / "store", NULL, random_tenants(case.tenants, 4, 4))
        backbone = export(store, repository, ServingOptions(dtype="fp32", slots=2 * case.tenants, threads=1)).backbone
        _raise_count(repository / f"{backbone}-lookup" / "config.pbtxt", case.lookups)
        add_noops(repository, case.tokens)
        with TritonServer(repository) as server:
            measured = {
                (model, *shape): _measure(server, model, *shape, case) for shape in SHAPES for model in (backbone, NOOP)
            }
            floor = [_measure(server, FLOOR, clients, 1, case) for clients in (1, 64)]
            over_grpc = {model: _over_grpc(server, model, case) for model in (backbone, NOOP)}
    figures: dict[str, object] = {}
    for model, prefix in ((backbone, ""), (NOOP, "noop_")):
        figures[f"{prefix}c1_p50_ms"] = round(measured[model, 1, 1].percentile_ms(50), 3)
        for clients in (64, 256):
            figures[f"{prefix}c{clients}_req_per_s"] = round(measured[model, clients, 1].req_per_s, 1)
        for texts in (16, 64):
            figures[f"{prefix}batch{texts}_texts_per_s"] = round(texts * measured[model, 64, texts].req_per_s, 1)
        figures[f"{prefix}c64_grpc_req_per_s"] = round(over_grpc[model], 1)
        figures[f"{prefix}c64_processor_us"] = measured[model, 64, 1].processor_us
    alone, ours_alone = floor[0].percentile_ms(50), measured[backbone, 1, 1].percentile_ms(50)
    ours, noop = measured[backbone, 64, 1].req_per_s, measured[NOOP, 64, 1].req_per_s
    return figures | {
        "floor_c1_p50_ms": round(alone, 3),
        "floor_c64_req_per_s": round(floor[1].req_per_s, 1),
        "c1_over_floor_ms": round(ours_alone - alone, 3),
        "c64_share_of_floor": round(ours / floor[1].req_per_s, 3),
        "c1_added_ms": round(ours_alone - measured[NOOP, 1, 1].percentile_ms(50), 3),
        "c64_share_of_noop": round(ours / noop, 3),
        "c64_grpc_share_of_noop": round(over_grpc[backbone] / over_grpc[NOOP], 3),
        "batch16_texts_over_noop_req": round(16 * measured[backbone, 64, 16].req_per_s / noop, 3),
        "case": asdict(case),
    }


def _raise_count(config: Path, count: int) -> None:
    config.write_text(config.read_text("utf-8").replace("count: 1", f"count: {count}"), "utf-8")


@dataclass(frozen=True)
class Measured:
    report: Report
    processor_us: dict[str, int]  # that each of the server's processes used for a request

    @property
    def req_per_s(self) -> float:
        return self.report.req_per_s

    def percentile_ms(self, percent: float) -> float:
        return self.report.percentile_ms(percent)


def _measure(server: TritonServer, model: str, clients: int, texts: int, case: GlueBench) -> Measured:
    drawn = _texts(case)
    requests = [
        infer_request(model, [drawn[(i + j) % len(drawn)] for j in range(texts)], _tenant(i, case)) for i in range(REQUESTS)
    ]
    host, port = server.http_url.split(":")
    send(Load(host, int(port), requests, seconds=case.seconds / 4, connections=clients))  # warms up
    print(f"{model}: {clients} clients, requests of {texts}", file=sys.stderr, flush=True)
    assert server.pid is not None
    before = processor_seconds(server.pid)
    (report,) = send(Load(host, int(port), requests, seconds=case.seconds, connections=clients))
    after = processor_seconds(server.pid)
    report.expect_success(f"{clients} clients with requests of {texts} texts to {model}")
    answered = report.req_per_s * case.seconds
    used = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return Measured(report, {name: round(1e6 * seconds / answered) for name, seconds in used.items() if seconds})


def _over_grpc(server: TritonServer, model: str, case: GlueBench) -> float:
    print(f"{model}: 64 clients over gRPC", file=sys.stderr, flush=True)
    return send(GrpcLoad(server.grpc_url, model, _tenant(0, case), _texts(case), 64, case.seconds))[0]


def _texts(case: GlueBench) -> list[str]:
    return texts_of(ServeBench("minilm", case.tokens, case.tenants, connections=REQUESTS))


def _tenant(number: int, case: GlueBench) -> str:
    return f"tenant-{number % case.tenants:0{len(str(case.tenants - 1))}d}"
