"""Training in one step, for tests of what stands around a training. Trainings: `tests/builder`, `cli/test_whole_way.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from builder.learning.limits import Limits
from builder.learning.loop import Training
from builder.learning.progress import Progress
from builder.store.resumable import Savepoint

USERS = (
    "builder.exits.heads", "builder.importing.matching", "builder.learning.causal", "builder.learning.distil",
    "builder.learning.masked",
    "builder.students.boosting", "builder.training.finetuning", "research.accuracy.recipes", "research.schemes.trained",
)  # fmt: skip

LATER = 20  # batches from which the later one is taken: of most small trainings it is in another pass over the data


@contextmanager
def by_one_step() -> Iterator[list[bool]]:
    """Lets all that trains take one step. Yields a list that gets of each training whether it starts anew."""
    anew: list[bool] = []

    def step(training: Training[Any], limits: Limits, file: Path | None = None, spent: float = 0.0) -> Progress:
        anew.append(Savepoint(file).load() is None)
        return _step_once(training, limits, Savepoint(file), spent)

    with pytest.MonkeyPatch.context() as patch:
        for module in USERS:
            patch.setattr(f"{module}.train", step)
        yield anew


def _step_once(training: Training[Any], limits: Limits, saved: Savepoint, spent: float) -> Progress:
    """Is called like `train`. It scores, moves each weight by its rate at most, scores again, and saves.

    After an interruption a training goes on with other batches: they must be those that it would have had.
    """
    now = Progress(seconds=spent)
    weights = {name: weight for group in training.groups for name, weight in group.parameters.items()}
    if (state := saved.load()) is not None:
        now = Progress(**state["progress"])
    else:
        for weight in weights.values():
            weight.requires_grad_(True)
        if training.start_counts:
            now.examined(training.exam(), weights, limits.doubt)
        if limits.used(now) < 1:
            with torch.no_grad():
                for before, after in _later(training):
                    same = float(training.loss(before)[0]) == float(training.loss(after)[0])
                    assert same, f"{training.title} goes on with another batch"
            loss, units = training.loss(next(training.batches(0)))
            loss.backward()
            _move(training)
            now.count(loss.item(), units, 0.0)
            held, exam = training.cut(), training.exam()
            now.examined(replace(exam, facts={**exam.facts, **held}), weights, limits.doubt)
            saved.save({"progress": vars(now)})
    with torch.no_grad():
        for name, kept in now.weights.items():
            weights[name].copy_(kept)
    return now


@torch.no_grad()
def _move(training: Training[Any]) -> None:
    for group in training.groups:
        for weight in group.parameters.values():
            if weight.grad is not None:
                weight -= group.peak * weight.grad / weight.grad.abs().max().clamp(min=1e-12)
                weight.grad = None


def _later(training: Training[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the second batch and a much later one: of a training from its start, and of one that goes on there."""
    batches = list(islice(training.batches(0), LATER))
    for at in sorted({1, len(batches) - 1} & {*range(1, len(batches))}):
        yield batches[at], next(training.batches(at))
