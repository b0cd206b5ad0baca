"""The progress of a training: its losses, its exams, and which weights it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from builder.console import tell

POINTS = 100  # of a learning curve


@dataclass(frozen=True)
class Exam:
    """The score of the weights on texts that they do not learn from."""

    score: float  # higher is better
    loss: float  # decides between equal scores
    error: float = 0.0  # the standard error of the score
    facts: Mapping[str, float] = field(default_factory=dict)  # for the report


@dataclass
class Progress:
    """The progress of a training, as a savepoint holds it."""

    steps: int = 0
    units: int = 0  # tokens or texts
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    exams: list[dict[str, float]] = field(default_factory=list)
    best: int = 0  # the number of the exam with the best score
    least: float = -math.inf  # the score from which on later weights are kept
    kept: int = 0  # the number of the exam whose weights are kept
    weights: dict[str, Tensor] = field(default_factory=dict)  # of that exam

    def count(self, loss: float, units: int, seconds: float) -> None:
        self.steps, self.units, self.seconds = self.steps + 1, self.units + units, seconds
        self.losses.append(loss)

    def examined(self, exam: Exam, weights: Mapping[str, Tensor], doubt: float) -> None:
        """Adds an exam. Of those that cannot be told from the best one, the last one's weights are kept."""
        learned = self.losses[int(self.exams[-1]["step"]) if self.exams else 0 :]
        found = {"step": self.steps, "score": exam.score, "loss": exam.loss, "learned": _mean(learned), **exam.facts}
        number, best = len(self.exams), self.exams[self.best] if self.exams else None
        self.exams.append(found)
        tell(exam=number, **found)
        if best is None or (exam.score, -exam.loss) > (best["score"], -best["loss"]):
            self.best, self.least = number, exam.score - doubt * exam.error
        if exam.score >= self.least:
            self.kept = number
            self.weights = {name: parameter.detach().clone() for name, parameter in weights.items()}

    @property
    def curve(self) -> list[list[float]]:
        """Returns (step, mean loss) of at most so many equal parts."""
        parts = np.array_split(np.array(self.losses), min(POINTS, len(self.losses))) if self.losses else []
        ends = np.cumsum([len(part) for part in parts], dtype=int).tolist()
        return [[end, round(float(part.mean()), 4)] for end, part in zip(ends, parts, strict=True)]

    def reported(self) -> dict[str, Any]:
        """Returns the part that the reports of all trainings share."""
        tenth = max(1, len(self.losses) // 10)
        return {
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "first_loss": _mean(self.losses[:tenth]),  # 0 without steps
            "last_loss": _mean(self.losses[-tenth:]),
            "curve": self.curve,
            "exams": [{name: round(value, 5) for name, value in exam.items()} for exam in self.exams],
            "kept_step": int(self.exams[self.kept]["step"]) if self.exams else self.steps,
        }

    def __str__(self) -> str:
        return f"step {self.steps}, loss {self.losses[-1]:.3f}" + (f", dev {self.exams[-1]['score']:.3f}" if self.exams else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
