"""`python -m research.papers staging`: the gain from staging a batch while another one computes (HMI, Table 6).

A fixed number of requests is in flight, and each answer sends the next one. There are more tenants than slots, so every batch
has to copy adapters. The variants take turns of a few seconds, so that a machine that drifts slows down all of them alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from queue import SimpleQueue

import numpy as np

from bench.rows import ModelSize, Positive, Row, Rows, ServedDtype, Tokens, benchmark, expect_text
from bench.server import random_export, settings_of, texts_of
from bench.turns import in_turn
from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.engine.encoder import Encoder
from hplm.engine.engine import Computed
from hplm.engine.service import EncoderService
from hplm.engine.settings import EARLIEST
from hplm.engine.sheets import StagedBatch
from hplm.lookup.lookup import Lookup
from hplm.process.driver import Driver
from hplm.request.answers import AnswersOrError
from hplm.request.form import Form
from testing.random_store import SIZES

ROUNDS = 5
BATCH_TEXTS = 32  # more for short texts, because a batch must hold the longest text
BATCHES = 3  # whose texts wait or run
TENANTS, SLOTS = 256, 64
WAYS = ("pipelined", "no_retrieval", "no_swapping", "synchronous")


@benchmark(size="toy", tokens=16, seconds=0.3, dtype="fp32")
def staging(*, size: ModelSize = "minilm", tokens: Tokens = 32, seconds: Positive = 10.0, dtype: ServedDtype = "auto") -> Rows:
    """Saturates the upper half, without a server, in each way of overlapping staging and computing.

    Figures are requests a second.

    :param seconds: of each way
    """
    expect_text(tokens, size)
    batch = max(BATCH_TEXTS, -(-SIZES[size].positions // tokens))
    options = ServingOptions(dtype=dtype, slots=SLOTS, batch_tokens=batch * tokens, batch_ms="0", commit_ms=EARLIEST)
    with random_export(SIZES[size], TENANTS, options) as backbone, ExitStack() as stack:
        folder, settings = backbone / "1", settings_of(backbone)
        forms = cycle(looked_up(Backbone(folder), texts_of(SIZES[size], [tokens] * 4 * TENANTS)))
        running: dict[str, tuple[EncoderService, Driver]] = {}
        for name in WAYS:
            service = EncoderService(folder, settings)
            stack.callback(service.close)
            change(service, name)
            running[name] = service, (driver := service.driven())
            stack.callback(driver.join)
            stack.callback(driver.close)
        turns = {name: partial(rate, *own, forms, BATCHES * batch, seconds / ROUNDS) for name, own in running.items()}
        rates = in_turn(turns, ROUNDS)
    yield from (Row(name, own, "/s") for name, own in rates.items())
    yield Row("pipelined_to_synchronous", rates["pipelined"] / rates["synchronous"])
    yield Row("device", settings.device.type)


def change(service: EncoderService, way: str) -> None:
    """Makes a service stage its batches in another way: a step waits until the engine is free, or nothing is staged ahead."""
    own = service.served
    if way == "synchronous":
        _one_after_the_other(service.encoder)
    if late := {"no_retrieval": "retrieve", "no_swapping": "swap"}.get(way):
        run, step = own.engine.run, getattr(own.stager, late)

        def run_late(batch: StagedBatch, stage: int = -1) -> Iterator[Computed]:
            step(batch)
            return run(batch, stage)

        own.engine.run = run_late
        setattr(own.stager, late, lambda batch: None)


def _one_after_the_other(encoder: Encoder) -> None:
    """Keeps an encoder from preparing a batch while another one computes."""
    prepare, compute, computing = encoder.prepare, encoder.compute, threading.Event()

    def compute_alone(staged: StagedBatch, stage: int = 0) -> bool:
        computing.set()
        try:
            return compute(staged, stage)
        finally:
            computing.clear()

    encoder.prepare, encoder.compute = (lambda: None if computing.is_set() else prepare()), compute_alone


def looked_up(backbone: Backbone, texts: list[str]) -> list[Form]:
    """Returns a request for each text, of random tenants."""
    lookup, view = Lookup(backbone), backbone.view
    chosen = np.random.default_rng(3).choice(len(view.snapshot.tenants), len(texts))
    asked = zip(chosen, texts, strict=True)
    return [lookup.resolve(view, view.snapshot.tenants[number], [text], None, False) for number, text in asked]


def rate(service: EncoderService, driver: Driver, forms: Iterator[Form], in_flight: int, seconds: float) -> float:
    """Returns answers a second while so many requests wait or run. Raises if an answer is an error."""
    answers: SimpleQueue[AnswersOrError] = SimpleQueue()
    start, sent, waiting = time.perf_counter(), 0, 0
    while True:
        while waiting < in_flight and time.perf_counter() < start + seconds:
            form = next(forms)
            form.head = form.head._replace(arrival_ns=time.monotonic_ns())
            service.submit(form, answers.put)
            driver.wake()
            sent, waiting = sent + 1, waiting + 1
        if not waiting:
            return sent / (time.perf_counter() - start)
        if isinstance(answer := answers.get(), Exception):
            raise answer
        waiting -= 1
