"""`hplm bench glue`: what Triton and our Python cost when computing is free, beside models that do nothing at all.

All ensembles are models of one server, and are measured in turn, so that all see the same machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

from bench.noop import ECHO, FLOOR, NOOP, add_noops
from bench.rows import ONLY_QUICK, Rows, Seconds, benchmark, rows_of_rounds, say
from bench.server import random_export, requests_of, tenant_id, texts_of, waits
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from hplm.server.process_group import computed_ns, members
from hplm.server.stubs import stubs
from loadtest.generator import Load
from loadtest.grpc_load import GrpcLoad
from loadtest.load import Report, send
from loadtest.server import children
from testing.random_store import MINILM

NULL = replace(MINILM, name="null", hidden=32, heads=2, intermediate=64, lower_layers=1, upper_layers=1)
CLIENTS = 64
CASES = {"c1": (1, 1), "c64": (CLIENTS, 1), "batch16": (CLIENTS, 16)}  # clients, and texts of a request
OURS = ("lookup", "upper", "engine")  # processes
TEXTS = 1024  # different ones, sent in turn
TENANTS = 16  # requests go to them in turn
TARGETS = {
    "c64_over_b": (">=", 1.0),
    "c64_over_c": (">=", 0.5),
    "c1_added_over_b_ms": ("<=", 0.7),
    "batch16_over_b": (">=", 7.0),
    "processor_over_b": ("<=", 1.2),
}


@benchmark(tokens=16, seconds=0.3, rounds=1)
def glue(*, tokens: Annotated[int, ONLY_QUICK] = 32, seconds: Seconds = 3.0, rounds: Annotated[int, ONLY_QUICK] = 3) -> Rows:
    """Measures the served path around a backbone of width 32 with one layer.

    Beside it are three ensembles of two Python models that do nothing, with as many bytes between them: noop B (`noop`) answers
    from threads, noop C (`floor`) from `execute`, and `echo` after a round through another process. In each round, all take
    turns over HTTP: one and 64 clients with a text, and 64 with requests of 16 texts. Then 64 use gRPC.

    `processor_us` is the processor time of a request by process, of which `beyond_b_us` is more than noop B's. `c1_waits`: how
    often a lone request lets a thread wait. A figure is the median of the rounds, and stands beside the least and the most.
    """
    options = ServingOptions(dtype="fp32", slots=2 * TENANTS, threads=1)
    texts = texts_of(NULL, [tokens] * TEXTS)
    with random_export(NULL, TENANTS, options) as folder:
        add_noops(folder.parent, tokens)
        with TritonServer(folder.parent) as server:
            found = [_figures(server, folder.name, texts, seconds) for _ in range(rounds)]
    yield from rows_of_rounds(found, TARGETS)


def _figures(server: TritonServer, ours: str, texts: list[str], seconds: float) -> dict[str, float]:
    """Returns the figures of one round."""
    models = {ours: "", NOOP: "noop_", FLOOR: "floor_", ECHO: "echo_"}
    c1, c64, batch16 = ({model: _turn(server, model, texts, seconds, *case) for model in models} for case in CASES.values())
    over_grpc = {model: _over_grpc(server, model, texts, seconds) for model in (ours, NOOP)}
    found: dict[str, float] = {}
    for model, prefix in models.items():
        found[f"{prefix}c1_p50_ms"] = c1[model].report.percentile_ms(50)
        found[f"{prefix}c64_req_per_s"] = c64[model].report.req_per_s
        found[f"{prefix}batch16_texts_per_s"] = 16 * batch16[model].report.req_per_s
    for case, turns in zip(CASES, (c1, c64, batch16), strict=True):
        for process, us in turns[ours].processor_us.items():
            found[f"processor_us/{case}/{process}"] = us
            found[f"beyond_b_us/{case}/{process}"] = us - turns[NOOP].processor_us[process]
    return found | {
        **{f"c1_waits/{process}": count for process, count in c1[ours].waits.items()},
        "c1_waits/ours": sum(c1[ours].waits[process] for process in OURS),
        "c64_grpc_req_per_s": over_grpc[ours],
        "c64_grpc_over_b": over_grpc[ours] / over_grpc[NOOP],
        "c64_over_b": found["c64_req_per_s"] / found["noop_c64_req_per_s"],
        "c64_over_c": found["c64_req_per_s"] / found["floor_c64_req_per_s"],
        "c64_over_echo": found["c64_req_per_s"] / found["echo_c64_req_per_s"],
        "c1_added_over_b_ms": found["c1_p50_ms"] - found["noop_c1_p50_ms"],
        "batch16_over_b": found["batch16_texts_per_s"] / found["noop_c64_req_per_s"],
        "processor_over_b": sum(c64[ours].processor_us.values()) / sum(c64[NOOP].processor_us.values()),
    }


class Turn(NamedTuple):
    report: Report
    processor_us: dict[str, float]  # of a request, by process
    waits: dict[str, float]


def _turn(server: TritonServer, model: str, texts: list[str], seconds: float, clients: int, together: int) -> Turn:
    say(f"{model}: {clients} clients, requests of {together} texts")
    requests = requests_of(model, texts, TENANTS, together=together)
    load = Load(server.http_url, requests, seconds=seconds, connections=clients)
    send(replace(load, seconds=seconds / 4))  # warms up
    before = _used(server, model)
    (report,) = send(load)
    both = zip(before, _used(server, model), strict=True)
    report.expect_success(f"{clients} clients of {model}")
    return Turn(report, *({name: (late[name] - early[name]) / report.succeeded for name in early} for early, late in both))


def _used(server: TritonServer, model: str) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the processor time and the waits of all processes of a server, by what they do for a model.

    The process of the echo stands where we have the engine.
    """
    assert server.pid is not None  # it runs
    own = {stub.model: stub.pid for stub in stubs(server.pid)}
    lookup, upper = own[f"{model}-lookup"], own[f"{model}-upper"]
    found = {"tritonserver": [server.pid], "lookup": [lookup], "upper": [upper], "engine": [*children(upper)]}
    found["others"] = [*{*members(server.pid)}.difference(*found.values())]
    return {name: computed_ns(pids) / 1e3 for name, pids in found.items()}, {name: waits(pids) for name, pids in found.items()}


def _over_grpc(server: TritonServer, model: str, texts: list[str], seconds: float) -> float:
    """Returns the requests a second of 64 clients."""
    say(f"{model}: {CLIENTS} clients over gRPC")
    load = GrpcLoad(server.grpc_url, model, tenant_id(0, TENANTS), texts, CLIENTS, seconds, warm_up_s=seconds / 4)
    (report,) = send(load)
    report.expect_success(f"{CLIENTS} clients over gRPC to {model}")
    return report.answered / report.seconds
