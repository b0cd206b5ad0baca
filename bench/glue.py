"""`hplm bench glue`: what Triton and our Python cost when computing is free, beside models that do nothing at all.

All ensembles are models of one server, and are measured in turn, so that all see the same machine.
"""

from __future__ import annotations

from dataclasses import replace

from bench.noop import ECHO, FLOOR, NOOP, add_noops
from bench.rows import Positive, Row, Rows, Whole, benchmark, expect_text, say
from bench.server import random_export, requests_of, tenant_id, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from loadtest.generator import Load, measured
from loadtest.grpc_load import GrpcLoad
from loadtest.load import Report, send
from testing.random_store import MINILM

NULL = replace(MINILM, name="null", hidden=32, heads=2, intermediate=64, lower_layers=1, upper_layers=1)
CLIENTS = 64
TEXTS = 1024  # different ones, sent in turn
TENANTS = 16  # requests go to them in turn


@benchmark(tokens=16, seconds=0.3)
def glue(*, tokens: Whole = 32, seconds: Positive = 5.0) -> Rows:
    """Measures the served path around a backbone of width 32 with one layer.

    Beside it are three ensembles of two Python models that do nothing, with as many bytes between them: `noop` answers from
    threads, `floor` from `execute`, and `echo` after a round through another process. Clients use HTTP, one and 64 with a text
    and 64 with requests of 16 texts; then 64 over gRPC.

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

            def report(model: str, clients: int, together: int = 1) -> Report:
                say(f"{model}: {clients} clients, requests of {together} texts")
                requests = requests_of(model, texts, TENANTS, together=together)
                load = Load(server.http_url, requests, seconds=seconds, connections=clients)
                return measured(load, f"{clients} clients of {model}", warm_up_s=seconds / 4)

            models = {ours: "", NOOP: "noop_", FLOOR: "floor_", ECHO: "echo_"}
            alone = {model: report(model, 1).percentile_ms(50) for model in models}
            rate = {model: report(model, CLIENTS).req_per_s for model in models}
            texts_per_s = 16 * report(ours, CLIENTS, together=16).req_per_s
            over_grpc = {}
            for model in (ours, NOOP):
                say(f"{model}: {CLIENTS} clients over gRPC")
                load = GrpcLoad(server.grpc_url, model, tenant_id(0, TENANTS), texts, CLIENTS, seconds, warm_up_s=seconds / 4)
                (answered,) = send(load)
                answered.expect_success(f"{CLIENTS} clients over gRPC to {model}")
                over_grpc[model] = answered.answered / seconds
    for model, prefix in models.items():
        yield Row(f"{prefix}c1_p50_ms", alone[model], "ms")
        yield Row(f"{prefix}c64_req_per_s", rate[model], "/s")
    yield Row("c1_added_ms", alone[ours] - alone[NOOP], "ms", most=1.0)
    yield Row("c64_share_of_noop", rate[ours] / rate[NOOP], least=0.65)
    yield Row("c64_share_of_floor", rate[ours] / rate[FLOOR])
    yield Row("c64_share_of_echo", rate[ours] / rate[ECHO], least=0.85)
    yield Row("batch16_texts_per_s", texts_per_s, "/s")
    yield Row("batch16_texts_over_noop_req", texts_per_s / rate[NOOP], least=4.0)
    yield Row("c64_grpc_req_per_s", over_grpc[ours], "/s")
    yield Row("c64_grpc_share_of_noop", over_grpc[ours] / over_grpc[NOOP])
