"""Distillation: from n-gram windows, the halves of a split BERT learn to match the original on whole texts.

Both halves learn for a root. Only the lower half learns for a domain (HMI, observation O1), since the upper is shared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from builder.console import passing_bar, say
from builder.learning.bodies import WholeBody
from builder.learning.limits import Budget
from builder.learning.loop import ParameterGroup, Training, half_precision, train
from builder.learning.progress import Exam
from builder.learning.ridge import fit
from builder.learning.windows import Lesson, Shrinking, SplitModel, TextPack, in_packs, lesson_of, reading
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
WAY_OUT = (
    "Start again with another --seed, with fewer --minutes or --steps, or with --minutes 0; that command names the folder to "
    "remove first"
)


def distil(
    checkpoint: Checkpoint, lower: LowerStack, upper: UpperStack, documents: Sequence[np.ndarray], budget: Budget, seed: int,
    device: torch.device, saved: Path | None = None, train_upper: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Changes `lower` and, with `train_upper`, `upper` in place, and returns the report. A result that explains held-out texts
    worse than the start is dropped. After an interruption the same call continues from `saved`."""
    held_out, training = split_documents(documents, seed)
    teacher = WholeBody(checkpoint).to(device).eval().requires_grad_(False)
    student = SplitModel(lower, upper).to(device).requires_grad_(False)
    lesson, chance = partial(lesson_of, Shrinking(checkpoint.config, device), teacher), np.random.default_rng(seed)
    batches = partial(reading, checkpoint.config, training, seed, device)
    with half_precision(device):
        held = [lesson(texts, chance) for texts in passing_bar(in_packs(held_out), "asking the original", unit="batch")]
    scale = _variance([one.at_split for one in held]), _variance([one.at_end for one in held])
    start, started = _examined(student, held, scale), time.monotonic()  # the time to learn begins after the exam
    if train_upper:
        with half_precision(device):
            given = passing_bar(islice(batches(), FIT_LESSONS), "asking the original", total=FIT_LESSONS, unit="batch")
            first = [lesson(*one) for one in given]
        fit(student, teacher, first)
    segments = upper.segments.weight if checkpoint.config.segments else None
    apart = None if segments is None else segments[1:] - segments[0]

    def loss_of(texts: TextPack) -> tuple[Tensor, int]:
        given = lesson(*texts)
        at_split, at_end = errors_of(student(given), given, scale)
        return at_split + at_end, given.tokens

    @torch.no_grad()
    def keep_apart() -> dict[str, float]:
        """Moves the other segments with the first, the only one in the lessons, at the distance that was fitted."""
        if train_upper and segments is not None and apart is not None:
            segments[1:] = segments[0] + apart
        return {}

    learning = Training(
        "adapting", device, groups_of(student, train_upper), batches, loss_of, lambda: _examined(student, held, scale), WAY_OUT,
        keep_apart,
    )  # fmt: skip
    now = train(learning, budget, saved, time.monotonic() - started)
    if not now.steps and not budget.empty and not budget.is_reached(now):
        say("adapting: the time was over before the first step, so the model is that of the start: give more --minutes")
    elif budget.until is not None and not budget.is_reached(now):
        say(
            f"adapting: {now.exams[now.kept]['score']:.3f} of the variance is explained after {now.steps:,} steps, less than "
            f"--until {budget.until:g}: allow more --minutes or --steps"
        )
    student.requires_grad_(True)
    return {
        "documents": len(documents),
        "held_out_tokens": sum(one.tokens for one in held),
        "seed": seed,
        "at_start": {**start.facts, "at_end": start.score},  # before the closed-form start; the first exam comes after it
        "explained": round(now.exams[now.kept]["score"], 4),
        "tokens": now.units,
        **now.reported(),
    }


def split_documents(documents: Sequence[np.ndarray], seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits documents into held-out ones and those to learn from."""
    found = readable(documents)
    order = np.random.default_rng(seed).permutation(len(found))
    lengths = [len(found[i]) for i in order]
    count = 1 + int(np.searchsorted(np.cumsum(lengths), min(HELD_OUT_TOKENS, HELD_OUT_SHARE * sum(lengths))))
    count = min(count, len(found) - 1)
    return [found[i] for i in order[:count]], [found[i] for i in order[count:]]


def readable(documents: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the documents with more than special tokens. Refuses fewer than two."""
    found = [document for document in documents if len(document) > 2]
    if len(found) < 2:
        raise InvalidInput(f"the corpus has {len(found)} documents with text: adaptation needs at least two, one a line")
    return found


def lower_groups(lower: LowerStack, rate: float = LEARNING_RATE) -> list[ParameterGroup]:
    """Returns the parameters that learn. Word vectors stay fixed: a short adaptation would change only a few of them."""
    inside, small = _inside_and_beside(lower, "lower", "words.")
    return [ParameterGroup(rate, inside), ParameterGroup(SMALL_RATE / LEARNING_RATE * rate, small)]


def groups_of(student: SplitModel, train_upper: bool) -> list[ParameterGroup]:
    if not train_upper:
        return lower_groups(student.lower, DOMAIN_RATE)
    inside, beside = _inside_and_beside(student.upper, "upper")
    return [*lower_groups(student.lower), ParameterGroup(UPPER_RATE, inside), ParameterGroup(SMALL_RATE, beside)]


def _inside_and_beside(stack: nn.Module, name: str, *fixed: str) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Returns the parameters inside of layers, and those of gates, positions and norms. Those that begin as `fixed` stay."""
    inside, beside = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    for own, parameter in stack.named_parameters():
        if not own.startswith(fixed):
            (inside if own.startswith("layers.") else beside)[f"{name}.{own}"] = parameter
    return inside, beside


def errors_of(hidden: tuple[Tensor, Tensor], lesson: Lesson, scale: tuple[float, float]) -> list[Tensor]:
    """Returns the squared error at the split and at the end, each as a share of the teacher's variance there."""
    pairs = zip(hidden, (lesson.at_split, lesson.at_end), scale, strict=True)
    return [(own.float() - wanted.float()).square().sum() / (len(own) * variance) for own, wanted, variance in pairs]


def _variance(states: Sequence[Tensor]) -> float:
    return float(torch.cat([*states]).float().var(0, unbiased=False).sum())


@torch.no_grad()
def _examined(student: SplitModel, exam: Sequence[Lesson], scale: tuple[float, float]) -> Exam:
    """Returns the shares of the variance of the teacher's hidden states that are explained on held-out texts.

    The score is that at the end; below 0 is bad.
    """
    with half_precision(exam[0].at_end.device):
        bar = passing_bar(exam, "scoring held-out texts", unit="batch")
        errors = torch.tensor([[*errors_of(student(lesson), lesson, scale), 1.0] for lesson in bar])
    weights = torch.tensor([lesson.tokens for lesson in exam], dtype=torch.float32)
    *found, total = (errors * weights[:, None]).sum(0).tolist()
    at_split, at_end = (round(1 - error / total, 4) for error in found)
    return Exam(at_end, 2 - at_split - at_end, facts={"at_split": at_split})
