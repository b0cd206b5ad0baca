"""`hplm bench job`: a served tenant's latency while the manager trains another one, beside the same without.

Requests arrive as a Poisson process, at a share of the server's capacity. In turns, the job goes on and is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
from tqdm import tqdm

from bench.rows import (
    ONLY_QUICK,
    Count,
    ModelSize,
    Positive,
    Row,
    Rows,
    Seconds,
    ServedDtype,
    Tokens,
    Whole,
    benchmark,
    expect_text,
    say,
)
from bench.server import requests_of, texts_of
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.errors import HplmError
from hplm.server import TritonServer, process_group
from loadtest.generator import Load, measured
from loadtest.load import Report, send
from manager.children import LOOK_SECONDS, PROGRESS, Child, Manner
from testing.random_repository import LABELS, RANK
from testing.random_store import SIZES, random_store, random_tenants, tokenizer_json

TENANTS = 16  # requests go to them in turn
MOST_CONNECTIONS = 512
TEXTS = 1024  # different ones, which are asked and learned
EPOCHS = 1000  # more than there is time for
START_S = 300.0  # of the job
ALONE, BESIDE = "alone", "beside"


@benchmark(size="toy", tokens=16, seconds=0.3, turns=1, connections=4)
def job(
    *,
    size: ModelSize = "minilm",
    tokens: Tokens = 128,
    load: Positive = 0.5,
    seconds: Seconds = 6.0,
    turns: Whole = 5,
    cores: tuple[Count, ...] = (),
    dtype: ServedDtype = "auto",
    connections: Annotated[int, ONLY_QUICK] = 64,
) -> Rows:
    """Serves random weights, and trains a tenant of the same backbone as a job of `hplm manager` does.

    :param load: share of the server's capacity
    :param turns: so many with the job, and as many without
    :param cores: numbers of the job's cores, as in `hplm manager --cores`; all, if none is named
    """
    expect_text(tokens, size)
    texts = texts_of(SIZES[size], [tokens] * TEXTS)
    reports: dict[str, list[Report]] = {ALONE: [], BESIDE: []}
    with TemporaryDirectory(prefix="hplm-bench-") as scratch:
        folder = Path(scratch)
        store = random_store(folder / "store", SIZES[size], random_tenants(TENANTS, RANK, LABELS), tokenizer=tokenizer_json)
        exported = export(store, folder / "repository", ServingOptions(dtype=dtype, slots=2 * TENANTS))
        with training(store, texts, folder, Manner(cores)) as child, TritonServer(folder / "repository") as server:
            requests = requests_of(exported.backbone, texts, TENANTS)
            say("the capacity")
            closed = Load(server.http_url, requests, seconds=seconds, connections=connections)
            rate = load * measured(closed, "the capacity", seconds / 2).req_per_s
            computed = wall = 0.0
            for seed in tqdm(range(turns), "turns alone and beside the job"):
                arrivals = np.random.default_rng(seed).exponential(1 / rate, max(2, round(rate * seconds))).cumsum()
                asked = Load(server.http_url, requests, arrivals[-1] + 1.0, connections=MOST_CONNECTIONS, arrivals=arrivals)
                reports[ALONE] += send(asked)
                before, start = process_group.computed_ns(process_group.members(child.pid)), time.monotonic()
                with going_on(child):
                    reports[BESIDE] += send(asked)
                computed += (process_group.computed_ns(process_group.members(child.pid)) - before) / 1e9
                wall += time.monotonic() - start
    for report in (*reports[ALONE], *reports[BESIDE]):
        report.expect_success("a turn", "give a lower --load")
    yield Row("req_per_s", rate, "/s")
    for percent in (50, 99):
        found = {name: [report.percentile_ms(percent) for report in own] for name, own in reports.items()}
        for name, values in found.items():
            yield Row(f"{name}/p{percent}_ms", float(np.median(values)), "ms", spread=(min(values), max(values)))
        ratio = float(np.median(found[BESIDE]) / np.median(found[ALONE]))
        yield Row(f"p{percent}_over_alone", ratio, most=1.2 if percent == 99 else None)
    yield Row("job_cores", computed / wall)


@contextmanager
def training(store: Store, texts: Sequence[str], folder: Path, manner: Manner) -> Iterator[Child]:
    """Starts a job that trains for longer than anybody waits, and stops it when it has begun to learn."""
    lines = (json.dumps({"text": text, "label": f"label-{number % LABELS}"}) for number, text in enumerate(texts))
    (folder / "train.jsonl").write_text("\n".join(lines), "utf-8")
    words = ["build", "tenant", "--id", "job", "--store", store.folder, "--train", folder / "train.jsonl"]
    words += ["--task", "classify", "--epochs", EPOCHS, "--device", "cpu"]
    say("the job starts")
    child, patience = Child(words, folder / "job", manner), time.monotonic() + START_S
    try:
        while not (folder / "job" / PROGRESS).exists():
            if child.look() or time.monotonic() > patience:
                raise HplmError(f"the job has not begun to train: {child.sentence()}")
            time.sleep(LOOK_SECONDS)
        os.killpg(child.pid, signal.SIGSTOP)
        yield child
    finally:
        child.ask_to_end(signal.SIGKILL)
        while not child.look():
            time.sleep(LOOK_SECONDS)


@contextmanager
def going_on(child: Child) -> Iterator[None]:
    os.killpg(child.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(child.pid, signal.SIGSTOP)
