"""`python -m research.papers staging`: the gain from staging a batch while another one computes (HMI, Table 6).

A fixed number of requests is in flight, and each answer sends the next one. There are more tenants than slots, so every batch
has to copy adapters. The variants take turns of a few seconds, so that a machine that drifts slows down all of them alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from statistics import median

import numpy as np

from bench.rows import EngineDtype, Positive, Row, Rows, Size, Whole, benchmark, expect_text
from bench.server import random_export, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.engine.encoder import Encoder, Prepared
from hplm.engine.engine import Computed, Engine
from hplm.engine.lookup import Lookup
from hplm.engine.process import Process
from hplm.engine.service import Service
from hplm.engine.settings import EARLIEST, Settings
from hplm.engine.sheets import StagedBatch
from hplm.parameters import parameters_of
from hplm.tenants.models import upper_config
from testing.random_store import SIZES

ROUNDS = 5
BATCH_TEXTS = 32  # more for short texts, because a batch must hold the longest text
BATCHES = 3  # whose texts wait or run
TENANTS, SLOTS = 256, 64
WAYS = ("pipelined", "no_retrieval", "no_swapping", "coarse_swapping", "synchronous")


@benchmark(size="toy", tokens=16, seconds=0.3, dtype="fp32")
def staging(*, size: Size = "minilm", tokens: Whole = 32, seconds: Positive = 10.0, dtype: EngineDtype = "auto") -> Rows:
    """Saturates the upper half, without a server, in each way of overlapping staging and computing.

    Figures are requests a second. On a CPU, `pipelined` and `coarse_swapping` are the same code: what is between them is noise.

    :param size: of the model
    :param tokens: of a text
    :param seconds: of each way
    :param dtype: precision of the engine
    """
    expect_text(tokens, size)
    batch = max(BATCH_TEXTS, -(-SIZES[size].positions // tokens))
    options = ServingOptions(dtype=dtype, slots=SLOTS, batch_tokens=batch * tokens, batch_ms="0", commit_ms=EARLIEST)
    with random_export(SIZES[size], TENANTS, options) as backbone:
        folder, settings = backbone / "1", Settings.read(parameters_of(upper_config(backbone.parent, backbone.name)))
        traffic = Traffic(folder, texts_of(SIZES[size], [tokens] * 4 * TENANTS), BATCHES * batch)
        services = {name: Service([(folder, settings)]) for name in WAYS}
        for name, service in services.items():
            change(service, name)
        processes = {name: service.driven() for name, service in services.items()}
        try:
            # The first turn warms up.
            turns = [
                {name: traffic.rate(services[name], processes[name], seconds / ROUNDS if turn else 0.5) for name in WAYS}
                for turn in range(ROUNDS + 1)
            ]
        finally:
            for name, service in services.items():
                processes[name].close()
                processes[name].join()
                service.close()
    rates = {name: median(turn[name] for turn in turns[1:]) for name in WAYS}
    for name, rate in rates.items():
        yield Row(name, rate, "/s")
    yield Row("pipelined_to_synchronous", rates["pipelined"] / rates["synchronous"])
    yield Row("pipelined_to_coarse_swapping", rates["pipelined"] / rates["coarse_swapping"])
    yield Row("device", settings.device.type)


def change(service: Service, way: str) -> None:
    """Makes a service stage its batches in another way: steps wait until the engine is free, or nothing is staged ahead."""
    (own,) = service.served
    if way == "synchronous":
        _one_after_the_other(service.encoder)
    elif way == "no_retrieval":
        own.stager.retrieve, late = _nothing, own.stager.retrieve
        _before_computing(own.engine, late)
    elif way == "no_swapping":
        own.stager.swap, late = _nothing, own.stager.swap
        _before_computing(own.engine, late)
    elif way == "coarse_swapping":
        _before_computing(own.engine, _wait_for_copies)


def _nothing(batch: StagedBatch) -> None:
    pass


def _wait_for_copies(batch: StagedBatch) -> None:
    for marks in batch.arrived.values():
        for mark in marks:
            mark.synchronize()


def _before_computing(engine: Engine, step: Callable[[StagedBatch], None]) -> None:
    run = engine.run

    def run_late(batch: StagedBatch) -> Iterator[Computed]:
        step(batch)
        return run(batch)

    engine.run = run_late


def _one_after_the_other(encoder: Encoder) -> None:
    """Keeps an encoder from preparing a batch while another one computes."""
    prepare, compute, computing = encoder.prepare, encoder.compute, threading.Event()

    def prepare_alone() -> Prepared | None:
        return None if computing.is_set() else prepare()

    def compute_alone(prepared: Prepared, stage: int = 0) -> bool:
        computing.set()
        try:
            return compute(prepared, stage)
        finally:
            computing.clear()

    encoder.prepare, encoder.compute = prepare_alone, compute_alone


class Traffic:
    """Sends looked-up requests, so that a fixed number of them wait or run at any time."""

    def __init__(self, folder: Path, texts: list[str], in_flight: int) -> None:
        self._in_flight, backbone = in_flight, Backbone(folder)
        lookup, view = Lookup(backbone), backbone.view
        chosen = np.random.default_rng(3).choice(len(view.snapshot.tenants), len(texts)).tolist()
        asked = zip((view.snapshot.tenants[number] for number in chosen), texts, strict=True)
        self._forms = [lookup.resolve(view, tenant, [text], None, False) for tenant, text in asked]

    def rate(self, service: Service, process: Process, seconds: float) -> float:
        """Returns answers a second. Raises if an answer is an error."""
        forms, answers, failures = cycle(self._forms), count(), []
        end, left = time.perf_counter() + seconds, threading.Semaphore(0)

        def send() -> None:
            form = next(forms)
            form.head = form.head._replace(arrival_ns=time.monotonic_ns())
            service.submit(form, answered)
            process.wake()

        def answered(answer: list | Exception) -> None:
            if isinstance(answer, Exception):
                failures.append(answer)
            elif time.perf_counter() < end and not failures:
                next(answers)
                send()
                return
            left.release()

        start = time.perf_counter()
        for _ in range(self._in_flight):
            send()
        for _ in range(self._in_flight):
            left.acquire()
        if failures:
            raise failures[0]
        return (next(answers) + self._in_flight) / (time.perf_counter() - start)
