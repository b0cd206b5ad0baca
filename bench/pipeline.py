"""`hplm bench pipeline`: the gain from staging a batch while another one computes (HMI, Table 6), without a server.

A fixed number of requests is in flight, and each answer sends the next one. There are more tenants than slots, so every batch
has to copy adapters. The variants take turns of a few seconds, so that a machine that drifts slows down all of them alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.rows import EngineDtype, Positive, Row, Rows, Size, Whole, benchmark, expect_text
from bench.server import random_export, texts_of
from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, computed
from hplm.engine.lookup import Lookup
from hplm.engine.overlap import OVERLAPS
from hplm.engine.process import Process
from hplm.engine.request import Request, Text
from hplm.engine.service import Service
from hplm.engine.settings import EARLIEST, Settings
from hplm.engine.staging import Stager, StagingSettings
from hplm.parameters import parameters_of
from hplm.tenants.models import upper_config
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import Ticket
from testing.random_store import SIZES

Answered = Callable[["list | Exception", tuple], None]

ROUNDS = 5
COMMITS = (0, 5)  # milliseconds before the engine is free, instead of a batch ahead
BATCHES = 3  # whose texts wait or run
STAGED = 12  # batches that measure which share of a batch's time staging takes


@benchmark(size="toy", tokens=16, seconds=0.3, dtype="fp32")
def pipeline(
    *,
    size: Size = "minilm",
    tokens: Whole = 32,
    batch_texts: Whole = 32,
    tenants: Whole = 256,
    slots: Whole = 64,
    seconds: Positive = 10.0,
    dtype: EngineDtype = "auto",
) -> Rows:
    """Saturates the upper half in each way of overlapping staging and computing.

    On a CPU, `pipelined` and `coarse_swapping` are the same code: what is between them is noise.

    :param size: of the model
    :param tokens: of a text
    :param batch_texts: of a batch; more for short texts, because a batch must hold the longest text
    :param tenants: more than slots
    :param slots: for adapters on the device
    :param seconds: of each variant
    :param dtype: precision of the engine
    """
    expect_text(tokens, size)
    batch = max(batch_texts, -(-SIZES[size].positions // tokens))
    options = ServingOptions(dtype=dtype, slots=slots, batch_tokens=batch * tokens, batch_ms="0")
    with random_export(SIZES[size], tenants, options) as backbone:
        folder, given = backbone / "1", parameters_of(upper_config(backbone.parent, backbone.name))
        traffic = Traffic(folder, texts_of(SIZES[size], [tokens] * max(4 * tenants, STAGED * batch)), BATCHES * batch)
        variants = {name: given | {"overlap": name, "commit_ms": EARLIEST} for name in OVERLAPS}
        variants |= {f"commit_{ms}_ms": given | {"commit_ms": str(ms)} for ms in COMMITS}
        services = {name: Service([(folder, Settings.read(parameters))]) for name, parameters in variants.items()}
        processes = {name: Process(service) for name, service in services.items()}
        rates: dict[str, list[float]] = {name: [] for name in services}
        try:
            for turn in tqdm(range(ROUNDS + 1), desc="all variants in turn"):
                for name, service in services.items():
                    rate = traffic.rate(service, processes[name], seconds / ROUNDS if turn else 0.5)
                    if turn:  # the first turn warms up
                        rates[name].append(rate)
            staging = _staging_share(folder, traffic, Settings.read(given), batch)
        finally:
            for name, service in services.items():
                processes[name].close()
                processes[name].join()
                service.close()
    median = {name: float(np.median(found)) for name, found in rates.items()}
    for name, rate in median.items():
        yield Row(name, rate, "/s")
    yield Row("pipelined_to_synchronous", median["pipelined"] / median["synchronous"])
    yield Row("pipelined_to_coarse_swapping", median["pipelined"] / median["coarse_swapping"])
    yield Row("staging_share", staging)
    yield Row("device", Settings.read(given).device.type)


class Traffic:
    """Sends looked-up requests, so that a fixed number of them wait or run at any time."""

    def __init__(self, folder: Path, texts: list[str], in_flight: int) -> None:
        self._backbone, self._in_flight = Backbone(folder), in_flight
        lookup, view = Lookup(self._backbone), self._backbone.view
        chosen = np.random.default_rng(3).choice(len(view.snapshot.tenants), len(texts)).tolist()
        tenants = [view.snapshot.tenants[number] for number in chosen]
        self._asked = [
            (tenant, lookup.resolve(view, tenant, [text], None, False)) for tenant, text in zip(tenants, texts, strict=True)
        ]

    def texts(self) -> list[Text]:
        found = []
        for tenant, looked_up in self._asked:
            request = Request(self._ticket(tenant), self._backbone.view, tenant, 1, lambda request, answer: None)
            found += request.texts_from(looked_up)
        return found

    def _ticket(self, tenant: Tenant) -> Ticket:
        snapshot = self._backbone.view.snapshot
        return Ticket(snapshot.export_number, snapshot.generation, tenant.uid, tenant.version, time.monotonic_ns(), 0, 0, 0)

    def rate(self, service: Service, process: Process, seconds: float) -> float:
        def send(number: int, answered: Answered) -> None:
            tenant, looked_up = self._asked[number % len(self._asked)]
            service.submit(self._ticket(tenant), looked_up, answered)
            process.wake()

        return saturated(send, self._in_flight, seconds)


def saturated(send: Callable[[int, Answered], object], in_flight: int, seconds: float) -> float:
    """Returns answers a second. Raises if an answer is an error.

    `send` sends the request of a number, which calls the function when it is answered.
    """
    numbers, answers, failures = count(), count(), []
    end, left = time.perf_counter() + seconds, threading.Semaphore(0)

    def answered(answer: list | Exception, counted: tuple) -> None:
        if isinstance(answer, Exception):
            failures.append(answer)
        elif time.perf_counter() < end and not failures:
            next(answers)
            send(next(numbers), answered)
            return
        left.release()

    start = time.perf_counter()
    for _ in range(in_flight):
        send(next(numbers), answered)
    for _ in range(in_flight):
        left.acquire()
    if failures:
        raise failures[0]
    return (next(answers) + in_flight) / (time.perf_counter() - start)


def _staging_share(folder: Path, traffic: Traffic, settings: Settings, batch_texts: int) -> float:
    """Returns the share of staging in the time of staging and computing one after the other. At most this can be hidden."""
    backbone = Backbone(folder)
    precision = settings.precision
    engine = Engine(backbone.upper(), settings.device, precision.dtype, precision.eight_bits)
    few_sizes = engine.takes_few_sizes
    stager = Stager(backbone, StagingSettings(settings.slots, settings.device, precision.dtype, few_sizes=few_sizes))
    texts, staging, whole = traffic.texts(), [], []
    for number in range(STAGED):
        start = time.perf_counter()
        batch = stager.stage(texts[number * batch_texts :][:batch_texts], broken=_raise)
        staged = time.perf_counter()
        assert batch is not None  # or `_raise` has raised
        computed(engine, batch)
        whole.append(time.perf_counter() - start)
        staging.append(staged - start)
        stager.release(batch.held)
    return float(np.median(staging) / np.median(whole))


def _raise(text: Text, error: Exception) -> None:
    raise error
