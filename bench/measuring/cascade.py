"""Measures cascades on real texts: what they lose, from logits, and what they save, in this process and through a server."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.measuring.cascade_answers import Answers, Examined, answers_of, figures_of
from bench.measuring.cascade_bare import Bare
from bench.measuring.cascade_material import CascadeBench, Cascaded, Material, material_of, say
from bench.measuring.cascade_served import Served
from bench.measuring.cascade_timing import timed
from bench.measuring.cascade_traffic import BATCH_TOKENS, asked_of, exported
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


def bench_cascade(case: CascadeBench) -> dict[str, Any]:
    material = material_of(case)
    found = [_examined(material, *pair) for pair in zip(material.cascaded, material.exits, strict=True)]
    figures = figures_of(found, case.drop) | {"batch_ms_over_strong": _predicted(material), "choices": material.choices}
    if case.timed != "nothing":
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
    """The keys of the issue are those of the bare engine; a server's are in `served`."""
    asked = asked_of(material)
    batch_texts = BATCH_TOKENS / float(np.mean(np.concatenate([test.measured.whole[-1].tokens for test in tests])))
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        repository = Path(folder) / "repository"
        backbone = exported(material, repository)
        bare = Bare(repository, backbone, asked)
        try:
            say("the bare engine")
            figures = timed(bare, asked, batch_texts, case)
        finally:
            bare.close()
        if case.timed == "served":
            say("a server")
            with TritonServer(repository) as server:
                figures["served"] = timed(Served(server, backbone, asked), asked, batch_texts, case)
    return figures
