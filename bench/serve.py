"""`hplm bench serve`: a real server beside the bare engine, with one number of tenants or several.

The engine, in a process of its own, and the server take turns. So neither takes the other's cores, and a machine that changes
its speed changes both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from subprocess import Popen
from typing import Annotated

import numpy as np
import torch
from tqdm import tqdm

from bench.noop import NOOP, add_noops
from bench.rows import (
    ONLY_QUICK,
    Count,
    ModelSize,
    Row,
    Rows,
    Seconds,
    ServedDtype,
    Size,
    Tokens,
    Whole,
    benchmark,
    expect_text,
    rows_of_rounds,
    say,
)
from bench.server import multiply, private_bytes, random_export, requests_of, settings_of, stage, tenant_id, texts_of, waiting
from builder.publish.model_configs import ServingOptions
from hplm.adapters.layout import Layout
from hplm.engine.backbone import Backbone
from hplm.engine.engine import computed
from hplm.engine.laid import StagingSettings
from hplm.engine.served import open_engine
from hplm.engine.staging import EncoderStager
from hplm.server import TritonServer
from hplm.tenants.snapshot import Snapshot
from loadtest.encode import infer_request
from loadtest.generator import Load, measured
from loadtest.load import Report, send
from testing.random_store import SIZES

BATCH_TOKENS = 4096
REQUESTS = 8192  # to several numbers of tenants: different ones, more than are sent
SHARE_OF_BOUND = {"bert-base": 0.95, "minilm": 0.85, "toy": 0.0}  # targets
MB = 1e6
LABELS, VECTORS = ("LABEL", "SCORE"), ("EMBEDDING",)  # outputs


@benchmark(size="toy", tokens=16, tenants=(4,), seconds=0.2, connections=4, busy=1, rounds=1)
def serve(
    *,
    size: ModelSize = "bert-base",
    tokens: Tokens = 128,
    tenants: tuple[Whole, ...] = (16,),
    seconds: Seconds = 20.0,
    connections: Annotated[int, ONLY_QUICK] = 64,
    dtype: ServedDtype = "auto",
    vectors: bool = False,
    busy: Count = 0,
    rounds: Annotated[int, ONLY_QUICK] = 3,
) -> Rows:
    """Exports a repository of random weights and serves it. Measures one client, and then saturation.

    Beside the server are the bare engine, and an ensemble of two models that do nothing. Processor time that both need bounds
    what a server could answer: `bound_req_per_s` is 1 / (1 / engine + 1 / noop). All take turns. A figure is the median of the
    rounds, and stands beside the least and the most.

    :param vectors: the tenants answer with vectors, the means of all tokens' states
    :param busy: programs that compute all the time, beside which one client is measured again
    :param tenants: requests go to them in turn. Several numbers, such as 1 10 100, also compare servers with as many tenants
    """
    expect_text(tokens, size)
    count = tenants[0] if len(tenants) == 1 else 16
    texts = texts_of(SIZES[size], [tokens] * 4 * connections)
    options = ServingOptions(dtype=dtype, slots=max(2, 2 * count), batch_tokens=BATCH_TOKENS)
    outputs = VECTORS if vectors else LABELS
    with random_export(SIZES[size], count, options, vectors=vectors) as folder:
        bare = BareEngine(folder, texts, tokens, seconds)
        add_noops(folder.parent, tokens)
        with TritonServer(folder.parent) as server:
            requests, noops = requests_of(folder.name, texts, count, outputs=outputs), requests_of(NOOP, texts, count)

            def load(sent: list[bytes], clients: int) -> Report:
                return of_connections(server.http_url, sent, sent, seconds, clients)

            precision = settings_of(folder).precision.name
            found = [_figures(bare, partial(load, requests), partial(load, noops), connections, busy) for _ in range(rounds)]
    targets = {
        "added_over_noop_ms": ("<=", 1.5 if size == "bert-base" else 1.0),
        "share_of_bound": (">=", SHARE_OF_BOUND[size]),
    }
    yield from rows_of_rounds(found, targets)
    yield Row("dtype", precision)
    yield Row("threads", torch.get_num_threads())
    if len(tenants) > 1:
        yield from tenants_served(size, tokens, sorted(tenants), seconds, connections, dtype, vectors)


def _figures(
    bare: BareEngine, ours: Callable[[int], Report], noop: Callable[[int], Report], connections: int, busy: int
) -> dict[str, float]:
    """Returns the figures of one round. `ours` and `noop` are asked by so many clients."""
    (engine,) = send(bare)
    alone, saturated = ours(1), ours(connections)
    noop_alone, noop_saturated = noop(1), noop(connections)
    rate, p50 = engine["texts_per_s"], alone.percentile_ms(50)
    bound, added = 1 / (1 / rate + 1 / noop_saturated.req_per_s), p50 - engine["p50_ms"]
    found = {
        "p50_ms": p50,
        "p99_ms": alone.percentile_ms(99),
        "engine_p50_ms": engine["p50_ms"],
        "noop_p50_ms": noop_alone.percentile_ms(50),
        "added_ms": added,
        "added_over_noop_ms": added - noop_alone.percentile_ms(50),
        "req_per_s": saturated.req_per_s,
        "engine_req_per_s": rate,
        "noop_req_per_s": noop_saturated.req_per_s,
        "bound_req_per_s": bound,
        "share_of_engine": saturated.req_per_s / rate,
        "bound_share_of_engine": bound / rate,
        "share_of_bound": saturated.req_per_s / bound,
        "generator_cpu_share": saturated.cpu_s / saturated.wall_s,
    }
    if busy:
        with burning(busy):
            beside = ours(1)
        found |= {
            "busy_p50_ms": beside.percentile_ms(50),
            "busy_p99_ms": beside.percentile_ms(99),
            "busy_over_alone": beside.percentile_ms(50) / p50,
        }
    return found


def one_and_many(
    url: str, requests: list[bytes], warming: list[bytes], seconds: float, connections: int
) -> tuple[Report, Report]:
    """Returns the reports of one connection, and then of all connections."""
    one, many = (of_connections(url, requests, warming, seconds, count) for count in (1, connections))
    return one, many


def of_connections(url: str, requests: list[bytes], warming: list[bytes], seconds: float, count: int) -> Report:
    say(f"measuring {count} connections for {seconds:g} s")
    load = Load(url, requests, seconds=seconds, connections=count)
    return measured(load, f"{count} connections", seconds / 4, warming=warming)


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Runs so many programs that compute all the time, each in one thread."""
    with ExitStack() as running:
        for _ in range(count):
            program = running.enter_context(Popen([sys.executable, "-c", "while True: pass"]))
            running.callback(program.kill)
        yield


@dataclass(frozen=True)
class BareEngine:
    """Stages and computes texts without threads, queue or server: one text, and batches of the best size."""

    folder: Path
    texts: list[str]
    tokens: int
    seconds: float

    @property
    def limit_s(self) -> float:
        return 600 + 2 * self.seconds

    def run(self) -> dict:
        backbone, settings = Backbone(self.folder / "1"), settings_of(self.folder)
        engine, stager = open_engine(backbone, settings)
        ready = [text for own in waiting(backbone, self.texts, backbone.view.snapshot.tenants) for text in own]

        def seconds_of(count: int, seconds: float = self.seconds / 8) -> float:
            times, end = [], time.perf_counter() + seconds
            batches = cycle([ready[i : i + count] for i in range(0, len(ready) - count + 1, count)])
            while time.perf_counter() < end or len(times) < 6:
                start = time.perf_counter()
                batch = stage(stager, next(batches))
                computed(engine, batch)
                times.append(time.perf_counter() - start)
                stager.release(batch.held)
            return float(np.median(times[1:]))

        alone, largest = seconds_of(1), min(BATCH_TOKENS // self.tokens, len(ready))
        counts = sorted({count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count < largest} | {largest})
        rates = {count: count / seconds_of(count) for count in tqdm(counts, desc="bare engine, batch sizes")}
        best = max(counts, key=rates.__getitem__)  # measured again: the best of noisy figures is too good
        return {"p50_ms": alone * 1e3, "texts_per_s": best / seconds_of(best, self.seconds / 2)}


def tenants_served(
    size: Size, tokens: int, counts: list[int], seconds: float, connections: int, dtype: str, vectors: bool = False
) -> Rows:
    """Measures servers of the same backbone with more and more tenants. Requests go to all tenants alike."""
    texts, options = texts_of(SIZES[size], [tokens] * 4 * connections), ServingOptions(dtype=dtype, batch_tokens=BATCH_TOKENS)
    rates, starts = {}, {}
    outputs = VECTORS if vectors else LABELS
    with random_export(SIZES[size], 1, options, vectors=vectors) as backbone:
        folder = backbone / "1"
        whole = multiply(folder, counts[-1])
        layouts = [Layout.of(key) for key in whole.layouts]
        for count in counts:
            Snapshot(whole.generation, whole.branches, whole.tenants[:count], whole.export, whole.ledger).save(
                folder / Backbone.TENANTS
            )
            say(f"{count} tenants")
            warming, requests = (
                [
                    infer_request(backbone.name, [texts[i % len(texts)]], tenant_id(number), outputs=outputs)
                    for i, number in enumerate(np.random.default_rng(seed).integers(0, count, REQUESTS).tolist())
                ]
                for seed in (1, 2)
            )
            begin = time.perf_counter()
            with TritonServer(folder.parent.parent) as server:
                starts[count] = time.perf_counter() - begin
                alone, saturated = one_and_many(server.http_url, requests, warming, seconds, connections)
                private = private_bytes(server.pid)
            rates[count] = saturated.req_per_s
            settings = settings_of(backbone)
            stager = EncoderStager(Backbone(folder), StagingSettings(settings.slots, settings.device, settings.precision.dtype))
            yield Row(f"tenants/{count}/req_per_s", rates[count], "/s")
            yield Row(f"tenants/{count}/p50_ms", alone.percentile_ms(50), "ms")
            yield Row(f"tenants/{count}/p99_ms", alone.percentile_ms(99), "ms")
            yield Row(f"tenants/{count}/start_s", starts[count], "s")
            yield Row(f"tenants/{count}/device_mb", stager.device_bytes / MB, "MB")
            yield Row(f"tenants/{count}/private_mb", private / MB, "MB")  # of all processes, without what they share
            yield Row(f"tenants/{count}/disk_mb", sum(layout.weight_bytes for layout in layouts) / MB, "MB")  # of one tenant
    yield Row("most_to_least/req_per_s", rates[counts[-1]] / rates[counts[0]], least=0.92)
    yield Row("most_to_least/start_s", starts[counts[-1]] / starts[counts[0]])
