"""Measures two stages of an engine on two cores, beside two engines of one core each and one engine with both cores.

Each engine is a process of its own, pinned to its cores, and makes its own load: a fixed number of requests is in flight, and
each answer sends the next one. The variants take turns, and a ratio is the median of those of the rounds, so that a machine
that drifts changes no ratio.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.measuring.pipeline import Traffic, parameters_of
from bench.measuring.serve import batch_texts
from bench.pipeline import PipelineBench
from bench.stages import StagesBench
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.request import Text
from hplm.engine.served import open_engine
from hplm.engine.service import Service
from hplm.engine.settings import STAGES, Settings
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.model.openmp import apart, compute_with
from hplm.tenants.level import FULL
from hplm.tenants.models import upper_config
from testing.random_store import SIZES, random_store, random_tenants

BATCHES = 4  # whose texts wait or run: one in each stage, one that is staged, one that waits
TIMED = 10  # batches that say how long each layer takes; the first two do not count
PIPELINED, REPLICAS, BOTH_CORES, ONE_STAGE, NO_STAGES = "pipelined", "replicas", "both_cores", "one_stage", "no_stages"


@dataclass(frozen=True)
class Engine:
    """An engine of a variant, in a process of its own."""

    cores: tuple[int, ...]
    changes: Mapping[str, str]  # of parameters


def bench_stages(case: StagesBench) -> dict:
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    if len(cores) < 2:
        raise InvalidInput("two stages take two cores, but this process may use one: start it with more")
    count = batch_texts(case.size, case.tokens, case.batch_texts)
    load = PipelineBench(case.size, case.tokens, count, case.tenants, case.slots, case.seconds, case.dtype, case.rank)
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as scratch:
        repository = Path(scratch) / "repository"
        store = random_store(Path(scratch) / "store", SIZES[case.size], random_tenants(case.tenants, case.rank, 4))
        options = ServingOptions(
            dtype=case.dtype, slots=case.slots, batch_tokens=count * case.tokens, batch_ms="0", device="cpu"
        )
        backbone = export(store, repository, options).backbone
        folder, given = repository / backbone / "1", parameters_of(upper_config(repository, backbone))
        layers = _in_process(_layer_ns, folder, given, load, cores[:1])
        first = _first_layers(layers)
        variants = _variants(cores, len(layers), first)
        with ExitStack() as running:
            started = {
                name: [running.enter_context(_serving(folder, given, load, engine)) for engine in engines]
                for name, engines in variants.items()
            }
            rates: dict[str, list[float]] = {name: [] for name in variants}
            for turn in tqdm(range(case.rounds + 1), desc="all variants in turn"):
                for name, engines in started.items():
                    rate = _rate(engines, case.seconds / case.rounds if turn else 0.5)
                    if turn:  # the first turn warms up
                        rates[name].append(rate)
    return figures_of(rates) | {
        "best_by_cut": round(float(layers.sum() / 2 / max(layers[:first].sum(), layers[first:].sum())), 3),
        "cut": variants[PIPELINED][0].changes[STAGES],
        "layer_ms": [round(own / 1e6, 3) for own in layers.tolist()],
        "case": asdict(replace(case, batch_texts=count)),
    }


def figures_of(rates: Mapping[str, list[float]]) -> dict:
    """Returns the figures of each variant's texts a second, by round."""

    def ratio(one: str, other: str) -> float:
        return round(float(np.median(np.array(rates[one]) / np.array(rates[other]))), 3)

    return {name: round(float(np.median(found)), 1) for name, found in rates.items()} | {
        "pipeline_over_replicas": ratio(PIPELINED, REPLICAS),
        "pipeline_over_both_cores": ratio(PIPELINED, BOTH_CORES),
        "one_stage_over_today": ratio(NO_STAGES, ONE_STAGE),  # of the time of a batch; today: without the parameter `stages`
        "rounds": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
    }


def table_of(figures: dict) -> str:
    names = (PIPELINED, REPLICAS, BOTH_CORES, ONE_STAGE, NO_STAGES)
    return "\n".join([
        *(f"{name:12} {figures[name]:8.1f} texts/s  {figures[name] / figures[REPLICAS]:5.2f} of replicas" for name in names),
        f"stages {figures['cut']}, layers of {', '.join(map(str, figures['layer_ms']))} ms",
        f"pipelined / replicas: {figures['pipeline_over_replicas']:.3f} (target 0.92)",
        f"by the times of its layers alone, this cut allows {figures['best_by_cut']:.3f}",
        f"the time of a batch, one stage / no stages: {figures['one_stage_over_today']:.3f} (target 1.03)",
    ])  # fmt: skip


def _variants(cores: tuple[int, ...], layers: int, first: int) -> dict[str, list[Engine]]:
    one, two = cores
    alone = {"threads": "1"}
    return {
        PIPELINED: [Engine(cores, alone | {STAGES: f"0-{first - 1}@cpu:{one} {first}-{layers - 1}@cpu:{two}"})],
        REPLICAS: [Engine((core,), alone) for core in cores],
        BOTH_CORES: [Engine(cores, {"threads": "2"})],
        ONE_STAGE: [Engine((one,), alone | {STAGES: f"0-{layers - 1}@cpu:{one}"})],
        NO_STAGES: [Engine((one,), alone)],
    }


def _first_layers(layer_ns: Array) -> int:
    """Returns how many layers the first of two stages has, so that the slowest stage is the fastest."""
    ends = np.cumsum(layer_ns)[:-1]
    return int(np.argmin(np.maximum(ends, layer_ns.sum() - ends))) + 1


def _layer_ns(folder: Path, given: Mapping[str, str], load: PipelineBench, cores: tuple[int, ...]) -> Array:
    """Returns the median time of each layer for a full batch, on one core."""
    os.sched_setaffinity(0, cores)
    compute_with(1)
    settings = Settings.read({**given, "threads": "1"})
    engine, stager = open_engine(Backbone(folder), settings)
    texts, ends, taken = Traffic(folder, load).texts(), list[int](), list[Array]()
    engine.after_layers(lambda: ends.append(time.perf_counter_ns()))
    for number in range(TIMED):
        batch = stager.stage(texts[number * load.batch_texts :][: load.batch_texts], _raise)
        assert batch is not None  # or `_raise` has raised
        ends[:] = [time.perf_counter_ns()]
        list(engine.run(batch))
        ends[engine.depths[FULL]] = time.perf_counter_ns()  # the last layer's with the heads
        taken.append(np.diff(ends))
        stager.release(batch.held)
    return np.median(taken[2:], axis=0)


def _raise(text: Text, error: HplmError) -> None:
    raise error


def _in_process(measure: Callable[..., Array], *given: object) -> Array:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(measure, given)


@contextmanager
def _serving(folder: Path, given: Mapping[str, str], load: PipelineBench, engine: Engine) -> Generator[Connection]:
    """Starts an engine. Yields the connection that takes seconds, and gives texts a second."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, folder, {**given, **engine.changes}, load, engine.cores), daemon=True)
    process.start()
    there.close()
    try:
        _ = _received(here)
        yield here
    finally:
        here.close()
        process.join()


def _serve(there: Connection, folder: Path, parameters: Mapping[str, str], load: PipelineBench, cores: tuple[int, ...]) -> None:
    os.sched_setaffinity(0, cores)
    service = apart(lambda: Service([(folder, Settings.read(parameters))]))
    try:
        traffic = Traffic(folder, load, BATCHES)
        there.send(0.0)
        while True:
            there.send(traffic.rate(service, there.recv()))
    except EOFError:
        pass  # no more is measured
    finally:
        service.close()


def _rate(engines: list[Connection], seconds: float) -> float:
    """Returns the texts a second of engines that compute at the same time."""
    for engine in engines:
        engine.send(seconds)
    return sum(map(_received, engines))


def _received(engine: Connection) -> float:
    try:
        return engine.recv()
    except EOFError:
        raise Broken("an engine's process ended: see its messages above") from None
