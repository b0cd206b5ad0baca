"""Measures cascades on real texts: what they lose, from logits, and what they save, in this process and through a server."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.cascade import CascadeBench
from bench.measuring.cascade_answers import Answers, Examined, answers_of, figures_of
from bench.measuring.cascade_bare import Bare
from bench.measuring.cascade_material import Cascaded, Material, material_of, say
from bench.measuring.cascade_served import Served
from bench.measuring.cascade_timing import timed
from bench.measuring.cascade_traffic import BATCH_TOKENS, CASCADE, asked_of, exported, voters
from builder.cascade.common_stacks import Tenants
from hplm.server import TritonServer

TARGETS = {  # of issue 22: the bound, and whether a figure may be at most or has to be at least this
    "latency_over_strong": ("<=", 0.79),
    "latency_over_vote": ("<=", 0.89),
    "p99_over_strong": ("<=", 1.15),
    "points_lost": ("<=", 0.5),
    "throughput_over_strong": (">=", 1.3),
    "overload_ratio": (">=", 1.3),
    "pruned_share": (">=", 0.1),
    "pruning_points": ("<=", 0.3),
    "ece_ratio": ("<=", 0.5),
    "control_share": ("<=", 0.03),
}


def bench_cascade(case: CascadeBench) -> dict[str, Any]:
    material = material_of(case)
    found = [_examined(material, *pair) for pair in zip(material.cascaded, material.exits, strict=True)]
    figures = figures_of(found, case.drop) | {"batch_ms_over_strong": _predicted(material), "choices": material.choices}
    if case.timed != "nothing":
        figures |= _timed(material, [one.test for one in found], case)
    figures["targets"] = {name: _met(name, figures[name]) for name in TARGETS if name in figures}
    figures["stacks"] = {f"layers-{layers}": _learned(material, f"layers-{layers}") for layers in case.stacks}
    described = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(case).items()}
    return figures | {"dtype": material.precision.name, "case": described}


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
    asked, ways = asked_of(material), voters(material)
    work = sum(tests[0].measured.depths)
    batch_texts = BATCH_TOKENS / float(np.mean(np.concatenate([test.measured.whole[-1].tokens for test in tests])))
    with tempfile.TemporaryDirectory(prefix="hplm-bench-") as folder:
        repository = Path(folder) / "repository"
        backbone = exported(material, repository)
        bare = Bare(repository, backbone, asked)
        try:
            say("the bare engine")
            figures = timed(bare, asked, ways, work, batch_texts, case) | bare.control_share(CASCADE)
        finally:
            bare.close()
        if case.timed == "served":
            say("a server")
            with TritonServer(repository) as server:
                figures["served"] = timed(Served(server, backbone, asked), asked, ways, work, batch_texts, case)
    return figures


def _met(name: str, figure: float | None) -> bool:
    bound, target = TARGETS[name]
    if figure is None:
        return False
    return figure <= target if bound == "<=" else figure >= target


def table_of(figures: Mapping[str, Any]) -> str:
    """Returns the figures beside their targets, and a row for each way of answering."""
    lines = [f"{'':<26}{'bare':>10}{'served':>10}  target"]
    served = figures.get("served", {})
    for name, (bound, target) in TARGETS.items():
        if name in figures:
            cells = f"{_cell(figures[name])}{_cell(served.get(name))}"
            lines.append(f"{name:<26}{cells}  {bound} {target:g}: {'met' if figures['targets'][name] else 'missed'}")
    predicted = figures["batch_ms_over_strong"]
    lines.append(f"{'batch_ms_over_strong':<26}{predicted:>10.3f}{'':>10}  by the profiles: throughput {1 / predicted:.2f}")
    lines += ["", f"{'test texts':<26}{'accuracy':>10}{'lost':>8}{'+-':>7}{'work':>7}{'go on':>8}"]
    for way, own in figures["ways"].items():
        lines.append(
            f"{way:<26}{own['accuracy']:>10.4f}{own['points_lost']:>8.2f}{own['error']:>7.2f}{own['work']:>7.2f}"
            f"{own['went_on']:>8.1%}"
        )
    lines += [
        "",
        "lost: points below strong; work: tokens x layers, of strong's",
        "",
        f"{'pruning, alpha':<26}{'words':>10}{'lost':>8}",
    ]
    lines += [f"{alpha:<26}{own['share']:>10.1%}{own['points']:>8.2f}" for alpha, own in figures["pruning"].items()]
    lines.append(f"{'ECE before / after':<26}{figures['ece_before']:>10.4f}{figures['ece_after']:>8.4f}")
    lines.append(f"{'without its bias':<26}{figures['debiased_before']:>10.4f}{figures['debiased_after']:>8.4f}")
    lines += [
        f"{name:<26}explains {own['at_end']:.1%} of the full stack's output, after {own['steps']} steps"
        for name, own in figures["stacks"].items()
    ]
    return "\n".join(lines)


def _cell(figure: float | None) -> str:
    return f"{figure:>10.3f}" if figure is not None else f"{'-':>10}"
