"""`hplm bench glue`: what Triton and our Python cost when computing is free, beside models that do nothing at all.

All ensembles are models of one server, and are measured in turn, so that all see the same machine.
"""

from __future__ import annotations

from dataclasses import replace

from bench.noop import ECHO, FLOOR, NOOP, add_noops
from bench.rows import Positive, Row, Rows, Whole, benchmark, expect_text, say
from bench.server import Used, random_export, requests_of, tenant_id, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from loadtest.generator import Load
from loadtest.grpc_load import GrpcLoad
from loadtest.load import Report, send
from testing.random_store import MINILM

NULL = replace(MINILM, name="null", hidden=32, heads=2, intermediate=64, lower_layers=1, upper_layers=1)
SHAPES = ((1, 1), (64, 1), (256, 1), (64, 16), (64, 64))  # clients and texts of a request
TEXTS = 1024  # different ones, sent in turn
TENANTS = 16  # requests go to them in turn


@benchmark(tokens=16, seconds=0.3)
def glue(*, tokens: Whole = 32, seconds: Positive = 5.0) -> Rows:
    """Measures the served path around a backbone of width 32 with one layer.

    Beside it are three ensembles of two Python models that do nothing, with as many bytes between them: `noop` answers from
    threads, `floor` from `execute`, and `echo` after a round through another process. Clients use HTTP: one, 64 and 256 with a
    text, and 64 with requests of 16 and 64 texts; then 64 over gRPC. `processor_us` is the processor time of each process for a
    request of 64 clients.

    :param tokens: of a text
    :param seconds: of each measurement
    """
    expect_text(tokens, "minilm")
    options = ServingOptions(dtype="fp32", slots=2 * TENANTS, threads=1)
    texts = texts_of(NULL, [tokens] * TEXTS)
    with random_export(NULL, TENANTS, options) as folder:
        repository, ours = folder.parent, folder.name
        add_noops(repository, tokens)
        with TritonServer(repository) as server:
            measured: dict[tuple, tuple[Report, dict[str, int]]] = {}
            for clients, together in SHAPES:
                for model in (ours, NOOP) + ((FLOOR, ECHO) if together == 1 and clients < 256 else ()):
                    requests = requests_of(model, texts, TENANTS, together=together)
                    measured[model, clients, together] = _measure(server, requests, clients, seconds)
            over_grpc = {}
            for model in (ours, NOOP):
                say(f"{model}: 64 clients over gRPC")
                load = GrpcLoad(server.grpc_url, model, tenant_id(0, TENANTS), texts, 64, seconds, warm_up_s=seconds / 4)
                (report,) = send(load)
                report.expect_success(f"64 clients over gRPC to {model}")
                over_grpc[model] = report.answered / seconds
    alone = {model: measured[model, 1, 1][0].percentile_ms(50) for model in (ours, NOOP, FLOOR, ECHO)}
    rate = {key: report.req_per_s for key, (report, _) in measured.items()}
    for model in (ours, NOOP, FLOOR, ECHO):
        prefix = "" if model == ours else f"{model}_"
        yield Row(f"{prefix}c1_p50_ms", alone[model], "ms")
        yield Row(f"{prefix}c64_req_per_s", rate[model, 64, 1], "/s")
    yield Row("c1_added_ms", alone[ours] - alone[NOOP], "ms", most=1.0)
    yield Row("c1_over_floor_ms", alone[ours] - alone[FLOOR], "ms")
    yield Row("c64_share_of_noop", rate[ours, 64, 1] / rate[NOOP, 64, 1], least=0.65)
    yield Row("c64_share_of_floor", rate[ours, 64, 1] / rate[FLOOR, 64, 1])
    yield Row("c64_share_of_echo", rate[ours, 64, 1] / rate[ECHO, 64, 1], least=0.85)
    for model, prefix in ((ours, ""), (NOOP, "noop_")):
        yield Row(f"{prefix}c256_req_per_s", rate[model, 256, 1], "/s")
        yield Row(f"{prefix}c64_grpc_req_per_s", over_grpc[model], "/s")
        for together in (16, 64):
            yield Row(f"{prefix}batch{together}_texts_per_s", together * rate[model, 64, together], "/s")
        for process, used in measured[model, 64, 1][1].items():
            yield Row(f"{prefix}c64_processor_us/{process}", used, "us")
    yield Row("c64_grpc_share_of_noop", over_grpc[ours] / over_grpc[NOOP])
    yield Row("batch16_texts_over_noop_req", 16 * rate[ours, 64, 16] / rate[NOOP, 64, 1], least=4.0)


def _measure(server: TritonServer, requests: list[bytes], clients: int, seconds: float) -> tuple[Report, dict[str, int]]:
    """Returns the report of the clients, and the microseconds of each process for a request."""
    load, asked = Load(server.http_url, requests, seconds=seconds, connections=clients), len(requests[0])
    send(replace(load, seconds=seconds / 4))  # warms up
    say(f"{clients} clients, requests of {asked} bytes")
    before = Used.by(server.pid)
    (report,) = send(load)
    used = Used.by(server.pid).since(before, report.req_per_s * seconds)
    report.expect_success(f"{clients} clients with requests of {asked} bytes")
    return report, used
