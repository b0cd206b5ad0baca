"""`hplm bench cascade`: plans of levels beside the full stack alone, and simpler ways to spare layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from bench.measuring.cascade import TARGETS, bench_cascade
from bench.measuring.cascade_material import ALL, CascadeBench
from bench.rows import EngineDtype, Positive, Rows, Whole, benchmark, rows_of

QUICK = {"train": 300, "epochs": 1, "seeds": 1, "minutes": 0.05, "stack_minutes": 0.02, "seconds": 1.0, "rounds": 1}
SHORT = 150  # texts of each kind


@benchmark(**QUICK, texts=SHORT)
def cascade(
    *,
    folder: Path = CascadeBench.folder,
    model: str | None = None,
    seeds: Whole = CascadeBench.seeds,
    drop: Annotated[float, Parameter(validator=Number(gte=0, lte=100))] = CascadeBench.drop,
    minutes: Positive = CascadeBench.minutes,
    stack_minutes: Positive = CascadeBench.stack_minutes,
    train: Whole = CascadeBench.train,
    epochs: Whole = CascadeBench.epochs,
    texts: Whole = ALL,
    seconds: Positive = CascadeBench.seconds,
    rounds: Whole = CascadeBench.rounds,
    dtype: EngineDtype = "auto",
    timed: Literal["nothing", "bare", "served"] = "served",
) -> Rows:
    """Builds tenants with levels on stacks of 1, 2 and 3 layers, from the docstrings of Python's library and MiniLM.

    Selects plans for them. Measures what the plans lose on test texts, and what they save in latency, throughput and in an
    overload, beside the full stack alone, one small level, and simpler ways. What is built is kept in the folder, so that a
    second run only measures.

    :param folder: what is built
    :param model: Hugging Face name or folder of another BERT than MiniLM
    :param seeds: tenants for each question
    :param drop: most points that a plan may lose
    :param minutes: of adapting the lower half
    :param stack_minutes: of each stack's learning
    :param train: texts of each tenant
    :param epochs: of each tenant
    :param texts: most texts for each of calibration, profile and test
    :param seconds: of each timed measurement
    :param rounds: turns of each timed measurement
    :param dtype: precision of the engine
    :param timed: nothing, the bare engine, or a server too
    """
    case = CascadeBench(
        folder, model, seeds=seeds, drop=drop, minutes=minutes, stack_minutes=stack_minutes, train=train, calibrate=texts,
        profile=texts, test=texts, epochs=epochs, seconds=seconds, rounds=rounds, dtype=dtype, timed=timed,
    )  # fmt: skip
    yield from rows_of(bench_cascade(case), TARGETS)
