"""The loop of an adaptation: its budget, its schedule, and a savepoint."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from builder.store.savepoint import Savepoint
from builder.training.model import Diverged
from hplm.errors import InvalidInput

WARM_UP = 0.1
GRADIENT_NORM = 1.0
POINTS = 100  # of a learning curve
FIRST_ROUND, LONGER = 128, 1.5  # steps of the first round on the way to a goal, and by how much the next one is longer
PACE_STEPS = 12  # after so many steps it is known how fast this machine makes them

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """Limits of an adaptation. The first one that is reached ends it. Steps alone give the same result every time."""

    minutes: float | None = None
    steps: int | None = None
    until: float | None = None  # ends earlier, when this share of held-out variance is explained (`distillation`)

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise InvalidInput("a budget needs a limit, in minutes or in steps")
        if not 0 <= (self.minutes or 0) < math.inf or (self.steps or 0) < 0:
            raise InvalidInput("a budget is 0 or more minutes or steps")
        if self.until is not None and not 0 < self.until < 1:
            raise InvalidInput(f"--until {self.until:g}: give a share between 0 and 1")

    @property
    def empty(self) -> bool:
        return self.minutes == 0 or self.steps == 0

    def part(self, share: float) -> Budget:
        minutes = share * self.minutes if self.minutes is not None else None
        return Budget(minutes, round(share * self.steps) if self.steps is not None else None)

    def used(self, steps: int, seconds: float) -> float:
        """Returns the share of the budget that is used."""
        if self.empty:
            return 1.0
        of_steps = steps / self.steps if self.steps is not None else 0.0
        return max(of_steps, seconds / (60 * self.minutes) if self.minutes is not None else 0.0)

    def rate(self, steps: int, seconds: float) -> float:
        """Returns the learning rate after so many steps, as a share of its peak: it rises, then falls to 0 at the end.

        With a goal, the end is not known. So it also rises and falls in rounds, each longer than the one before.
        """
        share = self.used(steps, seconds)
        if self.until is None:
            return _rise(share) * _fall(share)
        start, length = round_of(steps)
        done = (steps - start) / length
        return _rise(done) * _fall(done) * _fall(share)

    def outlook(self, pace: float) -> str:
        """Says what the budget amounts to, at this number of steps a second."""
        said = [f"{pace:.2g} steps a second here"]
        if self.steps is not None:
            said.append(f"{self.steps:,} steps take {duration(self.steps / pace)}")
        if self.minutes is not None:
            said.append(f"{duration(60 * self.minutes)} are some {round(60 * self.minutes * pace):,} steps")
        return ", ".join(said)


@dataclass
class Course:
    """The progress of a phase, without its weights."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # results found before or between steps

    @property
    def first_loss(self) -> float:
        """Returns the mean loss of the first tenth; 0 without steps."""
        return _mean(self.losses[: max(1, len(self.losses) // 10)])

    @property
    def curve(self) -> list[list[float]]:
        """Returns (step, mean loss) of at most so many equal parts."""
        parts = np.array_split(np.array(self.losses), min(POINTS, len(self.losses))) if self.losses else []
        ends = np.cumsum([len(part) for part in parts], dtype=int).tolist()
        return [[end, round(float(part.mean()), 4)] for end, part in zip(ends, parts, strict=True)]

    @property
    def last_loss(self) -> float:
        return _mean(self.losses[-max(1, len(self.losses) // 10) :])


@dataclass(frozen=True)
class Group:
    peak: float  # of the learning rate
    parameters: Mapping[str, Tensor]


class Learning:
    """One phase: the parameters of `module` in `groups` learn, all others stay as they are."""

    def __init__(self, module: nn.Module, groups: list[Group], budget: Budget, savepoint: Savepoint) -> None:
        module.requires_grad_(False)
        self._parameters = {name: parameter for group in groups for name, parameter in group.parameters.items()}
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            [{"peak": group.peak, "params": list(group.parameters.values())} for group in groups],
            weight_decay=0.01, betas=(0.9, 0.98), fused=True,
        )  # fmt: skip
        self._budget = budget
        self._savepoint = savepoint
        self.course = Course()
        self.begun = False
        if (state := savepoint.load()) is not None:
            self.begun = True
            self.course = Course(**state["course"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.put(state["parameters"])

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])

    def run(
        self,
        title: str,
        batches: Callable[[int], Iterator[T]],
        loss_of: Callable[[T], tuple[Tensor, int]],
        show_progress: bool,
        between: Callable[[float], bool] | None = None,
    ) -> Course:
        """Runs until the budget is used. `batches(n)` yields the batches of step n and of those that follow, and `loss_of`
        returns the loss and the tokens of one. `between` is called after each step with the share of the budget that is used,
        and says whether to end."""
        course, budget, following = self.course, self._budget, batches(self.course.steps)
        with tqdm(total=100, desc=title, unit="%", disable=not show_progress, bar_format="{l_bar}{bar}| {postfix}") as bar:
            before, started, first = course.seconds, time.monotonic(), course.steps
            after_first = started  # the first step is slower than the others
            while budget.used(course.steps, course.seconds) < 1:
                rate = budget.rate(course.steps, course.seconds)
                for group in self._optimizer.param_groups:
                    group["lr"] = group["peak"] * rate
                loss, tokens = loss_of(next(following))
                self._optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), GRADIENT_NORM)
                if not math.isfinite(value := loss.item()) or not math.isfinite(norm.item()):
                    raise Diverged(
                        f"{title} diverged: in step {course.steps + 1} the loss is {value:g} and its gradient {norm.item():g}. "
                        "Start again with another --seed, with fewer --minutes or --steps, or with --minutes 0; that command "
                        "names the folder to remove first"
                    )
                self._optimizer.step()
                course.steps += 1
                course.tokens += tokens
                course.losses.append(value)
                course.seconds = before + time.monotonic() - started
                share = budget.used(course.steps, course.seconds)
                if between is not None and between(share):
                    break
                steps = course.steps - first
                if steps == 1:
                    after_first = time.monotonic()
                elif steps == PACE_STEPS and show_progress:
                    pace = (steps - 1) / (time.monotonic() - after_first)
                    bar.write(f"{title}: {budget.outlook(pace)}", file=sys.stderr)
                left = max(0.0, course.seconds * (1 / share - 1))
                said = f"step {course.steps}, loss {course.losses[-1]:.3f}, {duration(left)} left"
                bar.set_postfix_str(said, refresh=False)
                bar.update(min(100.0, 100 * share) - bar.n)
                if self._savepoint.due:
                    self.save()
        self.save()
        return course

    def save(self) -> None:
        state = {"parameters": self.weights(), "optimizer": self._optimizer.state_dict(), "course": asdict(self.course)}
        self._savepoint.save(state)


def round_of(steps: int) -> tuple[int, int]:
    """Returns where the round of a step begins, and its length."""
    start, length = 0, FIRST_ROUND
    while steps >= start + length:
        start, length = start + length, int(LONGER * length)
    return start, length


def _rise(share: float) -> float:
    return min(1.0, (share + 1e-3) / WARM_UP)


def _fall(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
