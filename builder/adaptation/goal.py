"""The goal of an adaptation, `--until`: held-out texts are examined on the way, and it ends as soon as enough is explained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from builder.adaptation.learning import Budget, Course, round_of

ROUND_PARTS = 8  # of a round; an exam takes as long as one or two steps


class Goal:
    def __init__(self, budget: Budget, course: Course, examine: Callable[[], Sequence[float]], first: Sequence[float]) -> None:
        """`examine` returns shares of held-out variance; the last of them counts. `first`: the shares before the first step."""
        self._budget, self._course, self._examine = budget, course, examine
        self.exams: list[list[float]] = course.facts.setdefault("exams", [[0, *first]])  # steps, and the shares after them

    @property
    def is_reached(self) -> bool:
        return self._budget.until is not None and self.exams[-1][-1] >= self._budget.until

    def between(self, share: float) -> bool:
        """Examines after a step if it is time, and returns whether to end. `Learning.run` calls it."""
        if self._budget.until is not None and _is_examined(self._course.steps):
            self.exams.append([self._course.steps, *self._examine()])
        return self.is_reached

    def reported(self) -> dict[str, Any]:
        """Returns the fields of a report that the course knows."""
        course = self._course
        return {
            "first_loss": course.first_loss,
            "last_loss": course.last_loss,
            "curve": course.curve,
            "explained": self.exams,
            "steps": course.steps,
            "tokens": course.tokens,
            "seconds": round(course.seconds, 1),
            "tokens_per_second": round(course.tokens / course.seconds, 1),
        }

    def report_missed(self, end: float) -> None:
        """Prints a warning if nothing was learned, or less than the goal. `end`: the share that is explained now."""
        if self.is_reached:
            return
        if not self._course.steps and not self._budget.empty:
            print(
                "adapting: the time was over before the first step, so the model is that of the start: give more --minutes",
                file=sys.stderr,
            )
        elif self._budget.until is not None:
            print(
                f"adapting: {end:.3f} of the variance is explained after {self._course.steps:,} steps, less than --until "
                f"{self._budget.until:g}: allow more --minutes or --steps",
                file=sys.stderr,
            )


def _is_examined(steps: int) -> bool:
    """Returns whether held-out texts are explained after so many steps: in the second half of a round, whose rate is lower."""
    start, length = round_of(steps - 1)
    done, part = steps - start, length // ROUND_PARTS
    return done == length or (2 * done >= length and done % part == 0)
