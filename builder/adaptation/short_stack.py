"""Shorter upper stacks: a few layers learn to give, from the vectors of the tables, the end of the full upper stack.

The teacher is the store's own upper stack. Its answers are those that a shorter stack stands in for, it reads the same vectors,
and it is in every store, while the original checkpoint may lie elsewhere. The entry (positions, segments, norm) stays that of
the full stack: what it gives is right for the first layer, and second segments, which no lesson has, stay as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.adaptation.distillation import split_documents
from builder.adaptation.goal import Goal, GoalReport
from builder.adaptation.learning import Budget, Group, Learning
from builder.adaptation.lessons import Reading, Shrinking, Student, TextPack, Windowed, in_packs, index_of
from builder.hardware import OpaqueAttention, compiled, half_precision, step_tokens
from builder.packed_batches import positions_of
from builder.store.savepoint import Savepoint
from hplm.model.layer import Layers
from hplm.model.stacks import LowerStack, UpperStack

LEARNING_RATE = 1e-3  # on MiniLM, one layer of four explains less at 3e-4, two explain less at 3e-4 and at 2e-3


@dataclass(frozen=True)
class StackLesson:
    entered: Tensor  # what the first layer reads
    at_end: Tensor  # of the full stack
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return len(self.entered)


@dataclass(frozen=True)
class Start:
    layers: list[int]  # of the full stack
    explained: float


@dataclass(frozen=True)
class StackReport(GoalReport):
    layers: int
    started_from: list[int]  # the layers of the full stack that explain most without learning
    tried: list[dict[str, Any]]  # the choices that were compared for this
    at_start: float  # share of the variance of the full stack's output that is explained on held-out texts; below 0 is bad
    at_end: float


class StackLessons:
    def __init__(self, lower: LowerStack, upper: UpperStack, device: torch.device) -> None:
        self._teacher = Student(lower, upper).to(device).eval().requires_grad_(False)
        self._windows = Shrinking(upper.config, device)
        self._device = device

    @torch.no_grad()
    def lesson(self, texts: list[np.ndarray], chance: np.random.Generator) -> StackLesson:
        lengths = np.array([len(text) for text in texts])
        windows, window_of = self._windows(np.concatenate(texts), lengths, chance)
        positions = index_of(positions_of(lengths), self._device)
        entered, at_end = self._teacher(Windowed(windows, window_of, positions, lengths.tolist()))
        return StackLesson(entered, at_end, lengths.tolist())


def shorten(
    lower: LowerStack,
    upper: UpperStack,
    layers: int,
    documents: Sequence[np.ndarray],
    budget: Budget,
    seed: int,
    device: torch.device,
    show_progress: bool = True,
    saved: Path | None = None,
) -> tuple[UpperStack, StackReport]:
    """Returns a stack of so many layers. After an interruption the same call continues from `saved`."""
    started = time.monotonic()
    held_out, training = split_documents(documents, seed)
    in_half = half_precision(device)
    lessons = StackLessons(lower, upper, device)
    reading = Reading(upper.config, training, seed, step_tokens(device))
    with in_half:
        exam = [lessons.lesson(texts, np.random.default_rng([seed, i])) for i, texts in enumerate(in_packs(held_out))]
    scale = float(torch.cat([lesson.at_end for lesson in exam]).float().var(0, unbiased=False).sum())
    tried = [Start(chosen, _explained(cut(upper, chosen), exam, scale)) for chosen in choices(len(upper.layers), layers)]
    start = max(tried, key=lambda one: one.explained)
    stack = cut(upper, start.layers)
    learning = Learning(stack, [Group(LEARNING_RATE, dict(stack.layers.named_parameters()))], budget, Savepoint(saved))
    course = learning.course
    if not learning.begun:
        course.facts["first"] = learning.weights()
        course.seconds = time.monotonic() - started  # the time so far counts
    compiled([*lower.layers, *upper.layers, *stack.layers], device)

    def loss_of(texts: TextPack) -> tuple[Tensor, int]:
        with in_half:
            lesson = lessons.lesson(*texts)
            return _error(stack, lesson, scale), lesson.tokens

    goal = Goal(budget, course, lambda: [_explained(stack, exam, scale)], [start.explained])
    if not goal.is_reached:  # an earlier run may have been interrupted when it had reached its goal
        learning.run("adapting", reading.starting, loss_of, show_progress, goal.between)
    end = _explained(stack, exam, scale)
    goal.report_missed(end)
    kept = end >= start.explained
    if not kept:
        learning.put(course.facts["first"])
    report = StackReport(
        layers=layers,
        started_from=start.layers,
        tried=[asdict(one) for one in tried],
        documents=len(documents),
        held_out_tokens=sum(lesson.tokens for lesson in exam),
        at_start=start.explained,
        at_end=end if kept else start.explained,
        kept=kept,
        seed=seed,
        **goal.reported(),
    )
    return stack, report


def choices(full: int, layers: int) -> list[list[int]]:
    """Returns choices of so many of the full stack's layers: the first ones, the last ones, and some at equal distances."""
    spread = np.linspace(0, full - 1, layers).round().astype(int).tolist()
    found = [list(range(layers)), list(range(full - layers, full)), spread]
    return [choice for i, choice in enumerate(found) if choice not in found[:i]]


def cut(upper: UpperStack, chosen: Sequence[int]) -> UpperStack:
    """Returns a stack with copies of the full stack's entry and of the chosen layers."""
    stack = copy.deepcopy(upper)
    stack.config = replace(upper.config, upper_layers=len(chosen))
    stack.layers = Layers(layer for i, layer in enumerate(stack.layers) if i in chosen)
    for number, layer in enumerate(stack.layers):
        layer.number = number
    return stack


def _error(stack: UpperStack, lesson: StackLesson, scale: float) -> Tensor:
    """Returns the squared error as a share of the teacher's variance."""
    attend = OpaqueAttention(lesson.lengths, stack.heads, lesson.entered.device)
    error = stack.through(lesson.entered, attend).float() - lesson.at_end.float()
    return error.square().sum() / (len(error) * scale)


@torch.no_grad()
def _explained(stack: UpperStack, exam: Sequence[StackLesson], scale: float) -> float:
    error = sum(float(_error(stack, lesson, scale)) * lesson.tokens for lesson in exam)
    return round(1 - error / sum(lesson.tokens for lesson in exam), 4)
