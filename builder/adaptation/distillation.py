"""Adaptation: the halves of a split BERT learn to say, from n-gram windows, what the whole one says from whole texts.

For a root both halves learn. For a domain only the lower one does (HMI, observation O1): the upper one is shared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from builder.adaptation.fit import fit
from builder.adaptation.lessons import Lesson, Lessons, Student
from builder.adaptation.teacher import Teacher
from hplm.engine.engine import resolve_dtype
from hplm.errors import InvalidInput
from hplm.model.checkpoint import Checkpoint
from hplm.model.stacks import LowerStack, UpperStack

HELD_OUT_TOKENS = 4096
HELD_OUT_SHARE = 0.1
FIT_LESSONS = 32
LEARNING_RATE = 6e-4  # of the lower layers
UPPER_RATE = 1e-4  # the upper layers start where they belong
SMALL_RATE = 1e-3  # gates, positions and norms have far to go
WARM_UP = 0.1
GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Budget:
    """How long to adapt: minutes, or steps, which give the same result every time."""

    minutes: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise InvalidInput("a budget is given in minutes or in steps, one of them")
        if (self.minutes or 0) < 0 or (self.steps or 0) < 0:
            raise InvalidInput("a budget is not negative")

    @property
    def empty(self) -> bool:
        return not self.minutes and not self.steps


@dataclass(frozen=True)
class Explained:
    """Share of the variance of the teacher's hidden states on held-out texts; negative is worse than a constant."""

    at_split: float
    at_end: float


@dataclass(frozen=True)
class AdaptationReport:
    documents: int
    held_out_tokens: int
    at_start: Explained
    fitted: Explained  # after the closed form, before the first step
    at_end: Explained
    first_loss: float  # mean of the first tenth of the steps; 0 without steps
    last_loss: float
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    seed: int


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
) -> AdaptationReport:
    """Changes `lower`, and `upper` if asked to, in place."""
    started = time.monotonic()
    readable = [document for document in documents if len(document) > 2]  # more than special tokens
    if len(readable) < 2:
        raise InvalidInput(f"the corpus has {len(readable)} documents to learn from: adaptation needs two at least, one a line")
    rng = np.random.default_rng(seed)
    held_out, training = _held_out(readable, rng)
    teacher = Teacher(checkpoint).to(device).eval()
    student = Student(lower, upper).to(device)
    half_precision = torch.autocast(device.type, torch.bfloat16, resolve_dtype("auto", device) == torch.bfloat16)
    lessons = Lessons(checkpoint.config, teacher, device)
    with half_precision:
        exam = lessons.once(held_out, rng)
    stream = lessons.endless(training, rng)
    scale = _variances(exam)

    start = fitted = _explained(student, exam, scale)
    if train_upper:
        fit(student, teacher, list(islice(stream, FIT_LESSONS)))
        fitted = _explained(student, exam, scale)
    optimizer = _optimizer(student, train_upper)
    losses: list[float] = []
    tokens = 0
    with _Progress(budget, started, show_progress) as progress:
        while (share := progress.share()) < 1:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, (share + 1e-3) / WARM_UP) * (1 + math.cos(math.pi * share)) / 2
            with half_precision:
                lesson = next(stream)
                hidden = student(lesson)
            loss = sum(_errors(hidden, lesson, scale))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), GRADIENT_NORM)
            optimizer.step()
            tokens += lesson.tokens
            losses.append(loss.item())
            progress.step(losses[-1])
    seconds = time.monotonic() - started
    student.requires_grad_(True)
    tenth = max(1, len(losses) // 10)
    return AdaptationReport(
        documents=len(documents),
        held_out_tokens=sum(lesson.tokens for lesson in exam),
        at_start=start,
        fitted=fitted,
        at_end=_explained(student, exam, scale),
        first_loss=float(np.mean(losses[:tenth])) if losses else 0.0,
        last_loss=float(np.mean(losses[-tenth:])) if losses else 0.0,
        steps=len(losses),
        tokens=tokens,
        seconds=round(seconds, 1),
        tokens_per_second=round(tokens / seconds, 1),
        seed=seed,
    )


def _held_out(documents: list[np.ndarray], rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    order = rng.permutation(len(documents))
    total = sum(map(len, documents))
    room = min(HELD_OUT_TOKENS, HELD_OUT_SHARE * total)
    count = 1 + int(np.searchsorted(np.cumsum([len(documents[i]) for i in order]), room))
    count = min(count, len(documents) - 1)
    return [documents[i] for i in order[:count]], [documents[i] for i in order[count:]]


def _optimizer(student: Student, train_upper: bool) -> torch.optim.AdamW:
    """Word vectors stay: a short adaptation meets few of them, and the table is to treat all alike."""
    lower, upper = student.lower, student.upper
    small = [lower.places, lower.gate, lower.gate_bias, *lower.norm.parameters()]
    groups = [{"peak": LEARNING_RATE, "params": list(lower.layers.parameters())}]
    if train_upper:
        small += [upper.positions.weight, upper.segments.weight, *upper.norm.parameters()]
        groups.append({"peak": UPPER_RATE, "params": list(upper.layers.parameters())})
    groups.append({"peak": SMALL_RATE, "params": small})
    student.requires_grad_(False)
    for group in groups:
        for parameter in group["params"]:
            parameter.requires_grad_(True)
    return torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98), fused=True)


def _errors(hidden: tuple[Tensor, Tensor], lesson: Lesson, scale: tuple[float, float]) -> list[Tensor]:
    """Squared error at the split and at the end, each as a share of the teacher's variance there."""
    pairs = zip(hidden, (lesson.at_split, lesson.at_end), scale, strict=True)
    return [(own.float() - wanted.float()).square().sum() / (len(own) * variance) for own, wanted, variance in pairs]


def _variances(exam: Sequence[Lesson]) -> tuple[float, float]:
    """Of the teacher's hidden states on held-out texts."""

    def variance(parts: list[Tensor]) -> float:
        return float(torch.cat(parts).float().var(0, unbiased=False).sum())

    return variance([lesson.at_split for lesson in exam]), variance([lesson.at_end for lesson in exam])


@torch.no_grad()
def _explained(student: Student, exam: Sequence[Lesson], scale: tuple[float, float]) -> Explained:
    errors = torch.tensor([[*_errors(student(lesson), lesson, scale), 1.0] for lesson in exam])
    weights = torch.tensor([lesson.tokens for lesson in exam], dtype=torch.float32)
    at_split, at_end, total = (errors * weights[:, None]).sum(0).tolist()
    return Explained(round(1 - at_split / total, 4), round(1 - at_end / total, 4))


class _Progress:
    """How much of the budget is used, and a bar that says so."""

    def __init__(self, budget: Budget, started: float, shown: bool) -> None:
        self._budget = budget
        self._deadline = started + 60 * (budget.minutes or 0)
        self._first = time.monotonic()
        self._steps = 0
        self._bar = tqdm(total=100, desc="adapting", unit="%", disable=not shown, bar_format="{l_bar}{bar}| {postfix}")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def share(self) -> float:
        if self._budget.steps is not None:
            return self._steps / self._budget.steps if self._budget.steps else 1.0
        left = self._deadline - self._first
        return (time.monotonic() - self._first) / left if left > 0 else 1.0

    def step(self, loss: float) -> None:
        self._steps += 1
        share = self.share()
        left = (time.monotonic() - self._first) * (1 / share - 1)
        self._bar.n = min(100, round(100 * share))
        self._bar.set_postfix_str(f"step {self._steps}, loss {loss:.3f}, {max(0, left):.0f} s left")
