"""The progress of a tenant's training, and which of its epochs is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from builder.training.scores import Scores


@dataclass
class Course:
    """The progress of a training without its weights, as a savepoint holds it."""

    step: int = 0
    best: float = -math.inf
    best_loss: float = math.inf
    best_epoch: int = 0
    least: float = -math.inf  # the dev score from which on a later epoch is kept
    kept_epoch: int = 0
    loss_sum: float = 0.0  # of the current epoch
    seconds: float = 0.0  # of earlier, interrupted runs
    at_start: dict[str, float] = field(default_factory=dict)  # dev score and loss of the weights that are trained on
    history: list[dict[str, float]] = field(default_factory=list)

    def takes(self, epoch: int, scores: Scores, dev_loss: float, doubt: float) -> bool:
        """Returns whether the weights after this epoch are to be kept, unless later ones are."""
        if (scores.main, -dev_loss) > (self.best, -self.best_loss):
            self.best, self.best_loss, self.best_epoch = scores.main, dev_loss, epoch
            self.least = scores.main - doubt * scores.error
        if scores.main < self.least:
            return False
        self.kept_epoch = epoch
        return True

    def reported(self, held: dict[str, float]) -> dict[str, object]:
        """`held`: the share of the body's change that the adapter holds, if it was cut."""
        return {
            "epochs_run": len(self.history),
            "best_epoch": self.best_epoch,
            "kept_epoch": self.kept_epoch,
            **held,
            **({"at_start": _rounded(self.at_start)} if self.at_start else {}),
            "history": [_rounded(entry) for entry in self.history],
        }

    def __str__(self) -> str:
        return f", dev {self.history[-1]['dev']:.3f} (best {self.best:.3f})" if self.history else ""


def _rounded(scores: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in scores.items()}
