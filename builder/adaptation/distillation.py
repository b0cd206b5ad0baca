"""Distillation: from n-gram windows, the halves of a split BERT learn to match the original on whole texts.

Both halves learn for a root. Only the lower half learns for a domain (HMI, observation O1), since the upper is shared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from builder.adaptation.fit import fit
from builder.adaptation.goal import Goal
from builder.adaptation.learning import Budget, Group, Learning
from builder.adaptation.lessons import Lesson, Lessons, Reading, Student, TextPack
from builder.adaptation.teacher import Teacher
from builder.hardware import compiled, half_precision, step_tokens
from builder.store.savepoint import Savepoint
from hplm.errors import InvalidInput
from hplm.model.checkpoint import Checkpoint
from hplm.model.stacks import LowerStack, UpperStack

HELD_OUT_TOKENS = 4096
HELD_OUT_SHARE = 0.1
FIT_LESSONS = 32
LEARNING_RATE = 6e-4  # of the lower layers
DOMAIN_RATE = 1e-4  # of lower layers that were adapted before: at 3e-4 a short run makes them worse
UPPER_RATE = 1e-4  # of the upper layers, which start close to their goal
SMALL_RATE = 1e-3  # of gates, positions and norms, which start far from it


@dataclass(frozen=True)
class Explained:
    """Share of the variance of the teacher's hidden states that is explained on held-out texts; below 0 is bad."""

    at_split: float
    at_end: float


@dataclass(frozen=True)
class AdaptationReport:
    documents: int
    held_out_tokens: int
    seed: int
    kept: bool  # False: the result explains held-out texts worse than the start, and was dropped
    first_loss: float  # the mean over the first tenth of the steps; 0 without steps
    last_loss: float
    curve: list[list[float]]
    explained: list[list[float]]  # on the way to `until`: steps, and the shares explained after them
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    at_start: Explained
    fitted: Explained  # after the closed-form start, before the first step
    at_end: Explained


def adapt(
    checkpoint: Checkpoint,
    lower: LowerStack,
    upper: UpperStack,
    documents: Sequence[np.ndarray],
    budget: Budget,
    seed: int,
    train_upper: bool,
    device: torch.device,
    show_progress: bool = True,
    saved: Path | None = None,
) -> AdaptationReport:
    """Changes `lower` and, with `train_upper`, `upper` in place. After an interruption the same call continues from `saved`."""
    started = time.monotonic()
    held_out, training = split_documents(documents, seed)
    teacher = Teacher(checkpoint).to(device).eval()
    student = Student(lower, upper).to(device)
    in_half = half_precision(device)
    lessons = Lessons(checkpoint.config, teacher, device)
    reading = Reading(checkpoint.config, training, seed, step_tokens(device))
    with in_half:
        exam = lessons.once(held_out, np.random.default_rng(seed))
    scale = _variances(exam)
    learning = Learning(student, groups_of(student, train_upper), budget, Savepoint(saved))
    course = learning.course
    if not learning.begun:
        start = fitted = _explained(student, exam, scale)
        if train_upper:
            with in_half:
                first = [lessons.lesson(*given) for given in islice(reading.starting(0), FIT_LESSONS)]
            fit(student, teacher, first)
            fitted = _explained(student, exam, scale)
        course.facts |= {"at_start": asdict(start), "fitted": asdict(fitted), "first": learning.weights()}
        course.seconds = time.monotonic() - started  # the time so far counts
    compiled([*teacher.layers, *lower.layers, *upper.layers], device)  # not earlier: the closed-form start hooks into them

    def loss_of(texts: TextPack) -> tuple[Tensor, int]:
        with in_half:
            lesson = lessons.lesson(*texts)
            hidden = student(lesson)
        at_split, at_end = errors_of(hidden, lesson, scale)
        return at_split + at_end, lesson.tokens

    fitted = Explained(**course.facts["fitted"])

    def examine() -> tuple[float, float]:
        return astuple(_explained(student, exam, scale))

    goal = Goal(budget, course, examine, astuple(fitted))
    if not goal.is_reached:  # an earlier run may have been interrupted when it had reached its goal
        learning.run("adapting", reading.starting, loss_of, show_progress, goal.between)
    end = _explained(student, exam, scale)
    kept = end.at_end >= fitted.at_end
    if not kept:
        learning.put(course.facts["first"])
    elif train_upper:
        _keep_apart(upper.segments.weight, course.facts["first"]["upper.segments"])
    goal.report_missed(end.at_end)
    student.requires_grad_(True)
    return AdaptationReport(
        documents=len(documents),
        held_out_tokens=sum(lesson.tokens for lesson in exam),
        at_start=Explained(**course.facts["at_start"]),
        fitted=fitted,
        at_end=end if kept else fitted,
        kept=kept,
        seed=seed,
        **goal.reported(),
    )


@torch.no_grad()
def _keep_apart(segments: Tensor, fitted: Tensor) -> None:
    """Moves the other segments with the first, the only one in the lessons, at the distance that was fitted."""
    segments[1:] = segments[0] + (fitted[1:] - fitted[0]).to(segments.device)


def split_documents(documents: Sequence[np.ndarray], seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits documents into held-out ones and those to learn from."""
    return _held_out(readable(documents), np.random.default_rng(seed))


def readable(documents: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the documents with more than special tokens. Refuses fewer than two."""
    found = [document for document in documents if len(document) > 2]
    if len(found) < 2:
        raise InvalidInput(f"the corpus has {len(found)} documents with text: adaptation needs at least two, one a line")
    return found


def _held_out(documents: list[np.ndarray], rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    order = rng.permutation(len(documents))
    total = sum(map(len, documents))
    room = min(HELD_OUT_TOKENS, HELD_OUT_SHARE * total)
    count = 1 + int(np.searchsorted(np.cumsum([len(documents[i]) for i in order]), room))
    count = min(count, len(documents) - 1)
    return [documents[i] for i in order[:count]], [documents[i] for i in order[count:]]


def lower_groups(lower: LowerStack, rate: float = LEARNING_RATE) -> list[Group]:
    """Returns the parameters that learn. Word vectors stay fixed: a short adaptation would change only a few of them."""
    inside = {f"lower.layers.{name}": parameter for name, parameter in lower.layers.named_parameters()}
    small = {f"lower.{name}": getattr(lower, name) for name in ("places", "gate", "gate_bias")}
    small |= {f"lower.norm.{name}": parameter for name, parameter in lower.norm.named_parameters()}
    return [Group(rate, inside), Group(SMALL_RATE / LEARNING_RATE * rate, small)]


def groups_of(student: Student, train_upper: bool) -> list[Group]:
    groups = lower_groups(student.lower, LEARNING_RATE if train_upper else DOMAIN_RATE)
    if train_upper:
        upper = student.upper
        entry = {"upper.positions": upper.positions.weight, "upper.segments": upper.segments.weight}
        entry |= {f"upper.norm.{name}": parameter for name, parameter in upper.norm.named_parameters()}
        inside = {f"upper.layers.{name}": parameter for name, parameter in upper.layers.named_parameters()}
        groups += [Group(UPPER_RATE, inside), Group(SMALL_RATE, entry)]
    return groups


def errors_of(hidden: tuple[Tensor, Tensor], lesson: Lesson, scale: tuple[float, float]) -> list[Tensor]:
    """Returns the squared error at the split and at the end, each as a share of the teacher's variance there."""
    pairs = zip(hidden, (lesson.at_split, lesson.at_end), scale, strict=True)
    return [(own.float() - wanted.float()).square().sum() / (len(own) * variance) for own, wanted, variance in pairs]


def _variances(exam: Sequence[Lesson]) -> tuple[float, float]:
    """Returns the variance of the teacher's hidden states on held-out texts."""

    def variance(parts: list[Tensor]) -> float:
        return float(torch.cat(parts).float().var(0, unbiased=False).sum())

    return variance([lesson.at_split for lesson in exam]), variance([lesson.at_end for lesson in exam])


@torch.no_grad()
def _explained(student: Student, exam: Sequence[Lesson], scale: tuple[float, float]) -> Explained:
    errors = torch.tensor([[*errors_of(student(lesson), lesson, scale), 1.0] for lesson in exam])
    weights = torch.tensor([lesson.tokens for lesson in exam], dtype=torch.float32)
    at_split, at_end, total = (errors * weights[:, None]).sum(0).tolist()
    return Explained(round(1 - at_split / total, 4), round(1 - at_end / total, 4))
