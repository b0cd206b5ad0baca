"""When a training ends, when it is scored on the way, and how its learning rate rises and falls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from builder.learning.progress import Progress

WARM_UP = 0.1
FIRST_ROUND, LONGER = 128, 1.5  # steps of the first round on the way to a goal, and by how much the next one is longer
B = TypeVar("B")
LITTLE_EXPLAINED = 0.9  # of the variance of the original model's output: tenants of such a root lose points by it
ROUND_PARTS = 8  # of a round; an exam takes as long as one or two steps


@dataclass(frozen=True)
class Budget:
    """Minutes or steps. The first limit that is reached ends a training. Steps alone give the same result every time."""

    minutes: float | None = None
    steps: int | None = None
    until: float | None = None  # ends earlier, when an exam scores this much
    doubt: ClassVar[float] = 0.0  # by how many standard errors a later exam may be worse than the best one to be kept

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise InvalidInput("a budget needs a limit, in minutes or in steps")
        for name, limit in (("minutes", self.minutes), ("steps", self.steps)):
            if limit is not None and not 0 <= limit < math.inf:
                raise InvalidInput(f"--{name} {limit:g}: give 0 or more")
        if self.until is not None and not 0 < self.until < 1:
            raise InvalidInput(f"--until {self.until:g}: give a share between 0 and 1")

    @property
    def empty(self) -> bool:
        return self.minutes == 0 or self.steps == 0

    def part(self, share: float) -> Budget:
        minutes = share * self.minutes if self.minutes is not None else None
        return Budget(minutes, round(share * self.steps) if self.steps is not None else None)

    def used(self, now: Progress) -> float:
        """Returns the share of the training that is done. It ends at 1."""
        if self.empty or self.is_reached(now):
            return 1.0
        of_steps = now.steps / self.steps if self.steps is not None else 0.0
        return max(of_steps, now.seconds / (60 * self.minutes) if self.minutes is not None else 0.0)

    def is_reached(self, now: Progress) -> bool:
        return self.until is not None and bool(now.exams) and now.exams[-1]["score"] >= self.until

    def rate(self, now: Progress) -> float:
        """Returns the learning rate of the next step, as a share of its peak. It rises, then falls to 0 at the end.

        With a goal, the end is not known. So it also rises and falls in rounds, each longer than the one before.
        """
        share = self.used(now)
        if self.until is None:
            return _rise(share) * _fall(share)
        start, length = _round_of(now.steps)
        done = (now.steps - start) / length
        return _rise(done) * _fall(done) * _fall(share)

    def exam_due(self, now: Progress, exams: int) -> bool:
        """Returns whether the weights are scored after this step. `exams`: how often.

        Exams are evenly spread. With a goal they are in the second half of each round, whose rate is lower.
        """
        share = self.used(now)
        if share >= 1 or self.until is None:
            return share >= min(1.0, len(now.exams) / exams)
        start, length = _round_of(now.steps - 1)
        done = now.steps - start
        return done == length or (2 * done >= length and done % (length // ROUND_PARTS) == 0)


@dataclass(frozen=True)
class Epochs(Generic[B]):
    """Passes over the same texts, with an exam after each one."""

    batches: Sequence[Sequence[B]]  # of each epoch
    patience: int  # epochs without a better score before the training ends
    doubt: float = 0.0  # as of a `Budget`
    warm_up: float = WARM_UP  # share of the steps

    @property
    def ends(self) -> list[int]:
        """How many steps are done after each epoch."""
        return list(accumulate(map(len, self.batches)))

    def starting(self, number: int) -> Iterator[B]:
        """Yields the batches from the `number`-th on."""
        return islice(chain.from_iterable(self.batches), number, None)

    def used(self, now: Progress) -> float:
        if now.exams and len(now.exams) - 1 - now.best >= self.patience:
            return 1.0
        return now.steps / self.ends[-1]

    def rate(self, now: Progress) -> float:
        steps = self.ends[-1]
        return min((now.steps + 1) / (self.warm_up * steps + 1), (steps - now.steps) / steps)

    def exam_due(self, now: Progress, exams: int) -> bool:
        return now.steps in self.ends


Limits = Budget | Epochs[Any]


def _round_of(steps: int) -> tuple[int, int]:
    """Returns where the round of a step begins, and its length."""
    start, length = 0, FIRST_ROUND
    while steps >= start + length:
        start, length = start + length, int(LONGER * length)
    return start, length


def _rise(share: float) -> float:
    return min(1.0, (share + 1e-3) / WARM_UP)


def _fall(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise InvalidInput(f"seed {seed}: give a whole number from 0 to 2^64 - 1")


def check_options(options: Any, **bounds: float | tuple[float, float]) -> None:
    """Refuses a wrong seed or learning rate, and options outside of their bounds: the least, or the least and the most."""
    check_seed(options.seed)
    if not options.learning_rate > 0:
        raise InvalidInput(f"--learning-rate {options.learning_rate:g}: give a number above 0")
    for name, bound in bounds.items():
        least, most = bound if isinstance(bound, tuple) else (bound, math.inf)
        if (given := getattr(options, name)) is not None and not least <= given <= most:
            wanted = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
            raise InvalidInput(f"--{name.replace('_', '-')} {given:g}: give {wanted}")


def check_rank(rank: int, width: int) -> None:
    """Refuses an adapter that is wider than the backbone."""
    if rank > width:
        raise InvalidInput(f"--rank {rank}: give at most {width}, the width of the backbone")
