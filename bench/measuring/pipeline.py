"""Measures the gain from staging the next batch while this one computes (HMI, Table 6), in the upper half without a server.

A fixed number of requests is in flight, and each answer sends the next one. There are more tenants than slots, so every batch
has to copy adapters. The variants take turns of a few seconds, so that a machine that drifts slows down all of them alike.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tqdm import tqdm
from tritonclient.grpc.model_config_pb2 import ModelConfig  # pyright: ignore[reportAttributeAccessIssue] made when it is imported

from bench.measuring.serve import batch_texts, texts_of
from bench.pipeline import PipelineBench
from bench.serve import ServeBench
from bench.tools.saturation import Answered, saturated
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine
from hplm.engine.lookup import Lookup
from hplm.engine.overlap import OVERLAPS
from hplm.engine.request import Request, Text
from hplm.engine.service import Service
from hplm.engine.settings import EARLIEST, Settings
from hplm.engine.staging import Stager, StagingSettings
from hplm.tenants.models import upper_config
from hplm.tenants.snapshot import Tenant
from hplm.tenants.ticket import Ticket
from testing.random_store import SIZES, random_store, random_tenants

ROUNDS = 5
COMMITS = (0, 5)  # milliseconds before the engine is free, instead of a batch ahead
STAGED = 12  # batches that measure which share of a batch's time staging takes


class Traffic:
    """Sends looked-up requests, so that a fixed number of them wait or run at any time."""

    def __init__(self, folder: Path, case: PipelineBench, batches: int = 3) -> None:
        """`batches`: whose texts wait or run."""
        self._backbone = Backbone(folder)
        self._in_flight = batches * case.batch_texts
        lookup, view = Lookup(self._backbone), self._backbone.view
        tenants = np.random.default_rng(3).choice(case.tenants, max(4 * case.tenants, STAGED * case.batch_texts))
        texts = texts_of(ServeBench(case.size, case.tokens, case.tenants, connections=len(tenants) // 4))
        self._asked = []
        for number, text in zip(tenants, texts, strict=True):
            tenant = view.snapshot.tenants[number]
            self._asked.append((tenant, lookup.resolve(view, tenant, [text], None, False)))

    def texts(self) -> list[Text]:
        found = []
        for tenant, looked_up in self._asked:
            request = Request(self._ticket(tenant), self._backbone.view, tenant, 1, lambda request, answer: None)
            found += request.texts_from(looked_up)
        return found

    def _ticket(self, tenant: Tenant) -> Ticket:
        snapshot = self._backbone.view.snapshot
        return Ticket(snapshot.export_number, snapshot.generation, tenant.uid, tenant.version, time.monotonic_ns(), 0, 0, 0)

    def rate(self, service: Service, seconds: float) -> float:
        """Returns answers a second. Raises if an answer is an error."""

        def send(number: int, answered: Answered) -> None:
            tenant, looked_up = self._asked[number % len(self._asked)]
            service.submit(self._ticket(tenant), looked_up, answered)

        return saturated(send, self._in_flight, seconds)


def bench_pipeline(case: PipelineBench) -> dict:
    case = replace(case, batch_texts=batch_texts(case.size, case.tokens, case.batch_texts))
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        repository = Path(scratch) / "repository"
        store = random_store(Path(scratch) / "store", SIZES[case.size], random_tenants(case.tenants, case.rank, 4))
        options = ServingOptions(dtype=case.dtype, slots=case.slots, batch_tokens=case.batch_texts * case.tokens, batch_ms="0")
        backbone = export(store, repository, options).backbone
        folder, given = repository / backbone / "1", parameters_of(upper_config(repository, backbone))
        traffic = Traffic(folder, case)
        variants = {name: given | {"overlap": name, "commit_ms": EARLIEST} for name in OVERLAPS}
        variants |= {f"commit_{ms}_ms": given | {"commit_ms": str(ms)} for ms in COMMITS}
        services = {name: Service([(folder, Settings.read(parameters))]) for name, parameters in variants.items()}
        rates: dict[str, list[float]] = {name: [] for name in services}
        try:
            for turn in tqdm(range(ROUNDS + 1), desc="all variants in turn"):
                for name, service in services.items():
                    rate = traffic.rate(service, case.seconds / ROUNDS if turn else 0.5)
                    if turn:  # the first turn warms up
                        rates[name].append(rate)
            staging = _staging_share(folder, traffic, Settings.read(given), case)
        finally:
            for service in services.values():
                service.close()
    medians = {name: round(float(np.median(found)), 1) for name, found in rates.items()}
    return medians | {
        "device": Settings.read(given).device.type,
        "staging_share": round(staging, 4),
        "pipelined_to_synchronous": round(medians["pipelined"] / medians["synchronous"], 3),
        "rounds": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
        "case": asdict(case),
    }


def parameters_of(config: Path) -> dict[str, str]:
    """Returns the parameters that the server would give to the backend."""
    model = text_format.Parse(config.read_text("utf-8"), ModelConfig())
    return {name: value.string_value for name, value in model.parameters.items()}


def _staging_share(folder: Path, traffic: Traffic, settings: Settings, case: PipelineBench) -> float:
    """Returns the share of staging in the time of staging and computing one after the other. At most this can be hidden."""
    backbone = Backbone(folder)
    precision = settings.precision
    engine = Engine(backbone.upper(), settings.device, precision.dtype, precision.eight_bits)
    few_sizes = engine.takes_few_sizes
    stager = Stager(backbone, StagingSettings(settings.slots, settings.device, precision.dtype, few_sizes=few_sizes))
    texts, staging, whole = traffic.texts(), [], []
    for number in range(STAGED):
        start = time.perf_counter()
        batch = stager.stage(texts[number * case.batch_texts :][: case.batch_texts], broken=_raise)
        staged = time.perf_counter()
        assert batch is not None  # or `_raise` has raised
        list(engine.run(batch))
        whole.append(time.perf_counter() - start)
        staging.append(staged - start)
        stager.release(batch.held)
    return float(np.median(staging) / np.median(whole))


def _raise(text: Text, error: Exception) -> None:
    raise error


def table_of(figures: dict) -> str:
    base = figures["synchronous"]
    names = [*OVERLAPS, *(f"commit_{ms}_ms" for ms in COMMITS)]
    lines = [f"{name:16} {figures[name]:8.1f} req/s  {figures[name] / base:5.2f} of synchronous" for name in names]
    if figures["device"] == "cpu":
        noise = abs(figures["pipelined"] / figures["coarse_swapping"] - 1)
        lines.append(f"on a CPU, pipelined and coarse_swapping are the same code: the {noise:.1%} between them are noise")
    return "\n".join([*lines, f"staging is {figures['staging_share']:.1%} of a batch's time"])
