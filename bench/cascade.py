"""`hplm bench cascade`: plans of levels beside the full stack alone, and simpler ways to spare layers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from bench.cascade_answers import Answers, Examined, answers_of, figures_of
from bench.cascade_material import ALL, CascadeBench, Cascaded, Material, material_of, say
from bench.cascade_served import BATCH_TOKENS, Served, asked_of, exported, timed
from bench.rows import EngineDtype, Positive, Rows, Whole, benchmark, rows_of
from builder.cascade.common_stacks import Tenants
from hplm.server import TritonServer

TARGETS = {  # of issue 22: the bound, and whether a figure may be at most or has to be at least this
    "latency_over_strong": ("<=", 0.79),
    "p99_over_strong": ("<=", 1.15),
    "points_lost": ("<=", 0.5),
    "throughput_over_strong": (">=", 1.3),
    "overload_ratio": (">=", 1.3),
    "pruned_share": (">=", 0.1),
    "pruning_points": ("<=", 0.3),
    "ece_ratio": ("<=", 0.5),
}
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
    timed: Literal["nothing", "served"] = "served",
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
    :param timed: nothing, or a server
    """
    case = CascadeBench(
        folder, model, seeds=seeds, drop=drop, minutes=minutes, stack_minutes=stack_minutes, train=train, calibrate=texts,
        profile=texts, test=texts, epochs=epochs, seconds=seconds, rounds=rounds, dtype=dtype, timed=timed,
    )  # fmt: skip
    yield from rows_of(bench_cascade(case), TARGETS)


def bench_cascade(case: CascadeBench) -> dict[str, Any]:
    material = material_of(case)
    found = [_examined(material, *pair) for pair in zip(material.cascaded, material.exits, strict=True)]
    figures = figures_of(found, case.drop) | {"batch_ms_over_strong": _predicted(material), "choices": material.choices}
    if case.timed == "served":
        figures |= _timed(material, [one.test for one in found], case)
    figures["stacks"] = {f"layers-{layers}": _learned(material, f"layers-{layers}") for layers in case.stacks}
    return figures | {"dtype": material.precision.name}


def _learned(material: Material, stack: str) -> dict[str, Any]:
    """Returns how much a stack has learned: on a slow machine, it may be too little for a level that is worth its layers."""
    report = material.store.stack_report(stack)
    return {name: report[name] for name in ("layers", "at_end", "steps")}


def _predicted(material: Material) -> float:
    """Returns what a batch of the cascades takes over one of strong, by the profiles, if it is as large as the timed ones."""
    together = Tenants(material.profiles)
    plans = {
        one.tenant.id: next(own for own in material.profiles[one.tenant.id].plans if own.plan == one.ladder[0])
        for one in material.cascaded
    }
    batch = min(together.batch, BATCH_TOKENS)
    return round(together.seconds(plans, batch) / together.seconds(together.alone(), batch), 3)


def _examined(material: Material, one: Cascaded, twin: Cascaded) -> Examined:
    say(f"the answers of {one.tenant.id} to its test texts")
    kept, files = material.store.folder.parent / "answers", (one.question.test, one.question.profile)
    return Examined(one, *(answers_of(material, of, file, kept) for of in (one, twin) for file in files))


def _timed(material: Material, tests: list[Answers], case: CascadeBench) -> dict[str, Any]:
    asked = asked_of(material)
    batch_texts = BATCH_TOKENS / float(np.mean(np.concatenate([test.measured.whole[-1].tokens for test in tests])))
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        repository = Path(folder) / "repository"
        backbone = exported(material, repository)
        with TritonServer(repository) as server:
            return timed(Served(server, backbone, asked), batch_texts, case)
