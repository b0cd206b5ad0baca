"""The loop in which all learn: roots, domains, tenants, exits and students. A `Training` says what learns from what."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from builder.console import duration, progress_bar
from builder.learning.limits import Limits
from builder.learning.progress import Exam, Progress
from builder.store.resumable import Savepoint
from hplm.engine.engine import resolve_dtype
from hplm.errors import HplmError
from hplm.model.attention import avoid_plans
from hplm.model.fastest import TRAINING

GRADIENT_NORM = 1.0

B = TypeVar("B")


class Diverged(HplmError):
    """Training failed: there is no result to keep."""


@dataclass(frozen=True)
class ParameterGroup:
    peak: float  # of the learning rate
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class Training(Generic[B]):
    title: str
    device: torch.device
    groups: Sequence[ParameterGroup]  # all other parameters stay as they are
    batches: Callable[[int], Iterator[B]]  # takes n: the batches of step n and of those that follow, always the same
    loss: Callable[[B], tuple[Tensor, int]]  # of a batch, and the tokens or texts in it
    exam: Callable[[], Exam]
    way_out: str  # if it diverges
    cut: Callable[[], Mapping[str, float]] = dict  # changes the weights before an exam to the form that is stored
    exams: int = 1  # how often a training with a budget is scored
    start_counts: bool = True  # the weights at the start are scored too, and kept if none are better
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)


def products_dtype(device: torch.device) -> torch.dtype:
    """Returns the format in which a training's products are computed: the faster one of this machine."""
    return resolve_dtype("auto", device, TRAINING)


def half_precision(device: torch.device) -> torch.autocast:
    """Autocast to 16-bit products where the device computes faster with them. Weights and sums stay in 32 bits.

    From now on the process makes no plans for attention on CUDA, and torch does not say that a norm's weights have 32 bits.
    """
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    avoid_plans(device)
    return torch.autocast(device.type, torch.bfloat16, products_dtype(device) is torch.bfloat16)


def train(training: Training[B], limits: Limits, file: Path | None = None, spent: float = 0.0) -> Progress:
    """Trains, and leaves the kept weights in the parameters. After an interruption the same call goes on from `file`.

    `spent`: seconds of the limits that a start took before.
    """
    saved = Savepoint(file)
    weights = {name: parameter for group in training.groups for name, parameter in group.parameters.items()}
    for parameter in weights.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        [{"peak": group.peak, "params": list(group.parameters.values())} for group in training.groups],
        weight_decay=training.decay, betas=training.betas, fused=True,
    )  # fmt: skip
    now = Progress(seconds=spent)
    if (state := saved.load()) is not None:
        now = Progress(**state["progress"])
        optimizer.load_state_dict(state["optimizer"])
        _put(weights, state["weights"])
    before = now.seconds
    if training.start_counts and not now.exams:
        now.examined(training.exam(), weights, limits.doubt)
    started, batches = time.monotonic(), training.batches(now.steps)  # the exam at the start is no learning
    with progress_bar(title=training.title, total=100, unit="%", bar_format="{l_bar}{bar}| {postfix}") as bar:
        while limits.used(now) < 1:
            rate = limits.rate(now)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            with half_precision(training.device):
                loss, units = training.loss(next(batches))
            optimizer.zero_grad()
            loss.backward()  # several GPUs, each with its own batches, would average their gradients here
            norm = torch.nn.utils.clip_grad_norm_(weights.values(), GRADIENT_NORM)
            if not math.isfinite(value := loss.item()) or not math.isfinite(norm.item()):
                raise Diverged(
                    f"{training.title} diverged: in step {now.steps + 1} the loss is {value:g} and its gradient "
                    f"{norm.item():g}. {training.way_out}"
                )
            optimizer.step()
            now.count(value, units, before + time.monotonic() - started)
            if due := limits.exam_due(now, training.exams):
                held, exam = training.cut(), training.exam()
                now.examined(replace(exam, facts={**exam.facts, **held}), weights, limits.doubt)
            if due or saved.due:
                held = {name: parameter.detach() for name, parameter in weights.items()}
                saved.save({"progress": vars(now), "optimizer": optimizer.state_dict(), "weights": held})
            share = limits.used(now)
            left = duration(now.seconds * (1 / share - 1))
            bar.set_postfix_str(f"{now}, {left} left", refresh=False)
            bar.update(min(100.0, 100 * share) - bar.n)
    _put(weights, now.weights)
    return now


@torch.no_grad()
def _put(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        weights[name].copy_(tensor)
