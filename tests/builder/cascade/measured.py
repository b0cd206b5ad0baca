"""Made-up answers of three levels, whose later ones are right more often and cost more."""

from __future__ import annotations

import numpy as np

from builder.cascade.candidates import Answered, Measured
from builder.cascade.sheet_times import SheetTimes
from builder.training.labelled import Example
from builder.training.tasks import TRAINING_TASKS
from hplm.levels.calibration import Calibration

LABELS = ["a", "b", "c"]
TEXTS = 240
SEPARATION = (2.0, 2.5, 3.5)  # of the right class from the others, by level
WHOLE = np.array([[0, 0, 9]], dtype=np.int32)


def steady_seconds(engine, texts, tokens, *_):
    """Stands in for `Engine.seconds`: a time that follows from the layers, on each machine the same."""
    return 1e-6 * texts * tokens * len(engine._upper.layers)


def measured(texts=TEXTS, prune=True):
    """Returns levels whose logits are noise around the right class. Pruning with alpha above 0.7 ruins a level's answers.

    Less pruning changes none.
    """
    rng = np.random.default_rng(0)
    right = rng.integers(0, len(LABELS), texts)
    noise = rng.normal(0, 1, (texts, len(LABELS)))
    ease = np.where(rng.random(texts) < 0.7, 2.0, 0.5)  # most texts are easy for every level

    def answered(level):
        apart = ease * SEPARATION[level]
        logits = apart[:, None] * np.eye(len(LABELS))[right]
        logits = (2 * (logits + noise + rng.normal(0, 1, noise.shape))).astype(np.float32)
        return Answered(list(logits[:, None]), lengths, lengths - 2)

    def left_by(alpha, own):
        tokens = np.maximum(3, (1 - alpha / 2) * lengths).astype(np.int64)
        logits = own.logits if alpha <= 0.7 else [0 * one for one in own.logits]
        return Answered(logits, tokens, tokens - 2)

    lengths = rng.integers(5, 40, texts)
    whole = [answered(level) for level in range(3)]
    return Measured(
        task=TRAINING_TASKS["classify"],
        labels=LABELS,
        examples=[Example(number, "text", labels=(LABELS[own],)) for number, own in enumerate(right)],
        spans=[WHOLE] * texts,
        draws=rng.random((2, texts)),
        whole=whole,
        pruned=(lambda first, later, alpha: left_by(alpha, whole[later])) if prune else None,
        calibrations=[Calibration(temperature=2.0)] * 2,
        depths=[0.25, 0.5, 1.0],
        times=[SheetTimes((20, 1000), (0.02 * cost, cost), (0.02 * cost, cost)) for cost in (1.0, 2.0, 4.0)],
        in_one=np.ones(texts, dtype=bool),
    )
