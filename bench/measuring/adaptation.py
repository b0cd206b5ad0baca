"""Times the parts of a step in which a root learns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.adaptation import AdaptationBench
from bench.measuring.training import random_checkpoint
from builder.adaptation.distillation import errors_of, groups_of
from builder.adaptation.lessons import Lessons, Reading, Student
from builder.adaptation.teacher import Teacher
from builder.hardware import step_tokens
from hplm.engine.engine import resolve_dtype
from hplm.model.checkpoint import split
from hplm.model.windows import ABSENT
from testing.random_store import SIZES, random_documents, random_store

CPU = torch.device("cpu")
WARM_UP = 2  # steps
TEXT_TOKENS = 64
CORPUS_TOKENS = 200_000
PARTS = {
    "windows": "finding the distinct windows",
    "teacher": "the original model, forward",
    "lower": "the lower layers on windows, forward",
    "upper": "the upper layers, forward",
    "backward": "the gradients of both",
    "change": "the change of the weights",
}


def bench_adaptation(case: AdaptationBench) -> dict[str, Any]:
    config = SIZES[case.size]
    with TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(random_store(Path(folder) / "store", config, ()))
    teacher, student = Teacher(checkpoint).eval(), Student(*split(checkpoint))
    lessons, dtype = Lessons(config, teacher, CPU), resolve_dtype(case.dtype, CPU)
    in_half = torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16)
    documents = random_documents(config, CORPUS_TOKENS, TEXT_TOKENS, seed=0)
    stream = Reading(config, documents, 0, step_tokens(CPU)).starting(0)
    groups = groups_of(student, train_upper=True)
    learned = [parameter for group in groups for parameter in group.parameters.values()]
    student.requires_grad_(False)
    for parameter in learned:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(learned, lr=1e-6, fused=True)

    taken: dict[str, list[float]] = defaultdict(list)
    present: list[float] = []
    tokens = steps = 0
    with _timed(teacher, taken["teacher"]), _timed(student.lower, taken["lower"]):
        end = time.perf_counter() + case.seconds
        while steps <= WARM_UP or time.perf_counter() < end:
            at = [time.perf_counter()]
            with in_half:
                lesson = lessons.lesson(*next(stream))
                at.append(time.perf_counter())
                hidden = student(lesson)
            loss = torch.stack(errors_of(hidden, lesson, (1.0, 1.0))).sum()
            at.append(time.perf_counter())
            optimizer.zero_grad()
            loss.backward()
            at.append(time.perf_counter())
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            at.append(time.perf_counter())
            lesson_seconds, student_seconds, backward, change = np.diff(at)
            taken["windows"].append(lesson_seconds - taken["teacher"][-1])
            taken["upper"].append(student_seconds - taken["lower"][-1])
            taken["backward"].append(backward)
            taken["change"].append(change)
            present.append(float((lesson.windows != ABSENT).float().mean()))
            tokens, steps = tokens + lesson.tokens * (steps >= WARM_UP), steps + 1
    medians = {part: float(np.median(taken[part][WARM_UP:])) for part in PARTS}
    whole = sum(medians.values())
    return {
        **{f"{part}_ms": round(1e3 * seconds, 2) for part, seconds in medians.items()},
        **{f"{part}_share": round(seconds / whole, 3) for part, seconds in medians.items()},
        "step_ms": round(1e3 * whole, 1),
        "present": round(float(np.mean(present)), 3),
        "tokens": round(tokens / (steps - WARM_UP)),
        "steps": steps - WARM_UP,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def table_of(figures: dict[str, Any]) -> str:
    lines = [f"a step of {figures['tokens']:,} tokens in {figures['dtype']}, {figures['threads']} threads"]
    for part, text in PARTS.items():
        lines.append(f"{figures[f'{part}_ms']:>10.1f} ms  {100 * figures[f'{part}_share']:>5.1f} %  {text}")
    lines.append(f"{figures['step_ms']:>10.1f} ms           together")
    return "\n".join(lines)


@contextmanager
def _timed(module: nn.Module, seconds: list[float]) -> Iterator[None]:
    """Appends the time of each call of the module."""
    began = [0.0]

    def begin(*_: object) -> None:
        began[0] = time.perf_counter()

    hooks = [
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(lambda *_: seconds.append(time.perf_counter() - began[0])),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
