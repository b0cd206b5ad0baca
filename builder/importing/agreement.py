"""Compares the answers of a tenant with those of the checkpoint that it was made from, to the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.tasks.tasks import Rows
from builder.training.build import WORST, shown
from builder.training.data import Data
from hplm.arrays import Array
from hplm.tasks.answers import softmax
from hplm.tenants.embedding import normalised

SURE = 0.9  # a checkpoint is sure of an answer from this probability on
SAME = 1e-6  # numbers that are no further apart are the same
NEAR = 0.1  # of the spread of a checkpoint's numbers: two that are no further apart are the same answer


@dataclass(frozen=True)
class Agreement:
    """Of a `classify`, `regress` or `span` a text is one answer; of a `tag` a word is, and of a `multilabel` a label of it.

    Of an `embed` it is a vector.
    """

    same: Array  # of each answer, whether it is the checkpoint's; of a vector, its cosine with the checkpoint's
    sure: Array | None = None  # the checkpoint's probability of each of its answers; None: numbers have none
    divergence: float | None = None  # mean KL divergence from the checkpoint's probabilities, in nats

    @property
    def share(self) -> float:
        return float(self.same.mean())

    @property
    def error(self) -> float:
        """The standard error of the share."""
        return float(self.same.std()) / len(self.same) ** 0.5

    def described(self) -> dict[str, Any]:
        found: dict[str, Any] = {"answers": len(self.same), "agreement": self.share, "off": self.error}
        if self.divergence is not None:
            found["divergence"] = self.divergence
        if self.sure is not None:
            is_sure = self.sure >= SURE
            parts = {"where_sure": self.same[is_sure], "elsewhere": self.same[~is_sure]}
            found |= {"sure": float(is_sure.mean())} | {name: float(p.mean()) if len(p) else None for name, p in parts.items()}
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in found.items()}


def agreement(data: Data, own: Sequence[Rows], wanted: Sequence[Rows]) -> Agreement:
    """Compares the rows of each text of `data.dev`. `wanted`: those of the checkpoint."""
    task = data.task
    if task.served.is_vector:
        mine, theirs = (normalised(np.concatenate([vectors for _, vectors in rows])) for rows in (own, wanted))
        return Agreement((mine * theirs).sum(1))
    if task.served.is_number:
        mine, theirs = (np.concatenate([logits[:, 0] for _, logits in rows]) for rows in (own, wanted))
        return Agreement(np.abs(mine - theirs) <= max(NEAR * theirs.std(), SAME))
    if task.served.needs_pair:
        mine, theirs = (task.answers(data.labels, data.dev.examples, rows) for rows in (own, wanted))
        same = np.array([one.labels == other.labels for one, other in zip(mine, theirs, strict=True)])
        return Agreement(same, np.array([other.scores[0] for other in theirs]))
    mine, theirs = (np.concatenate([_choices(*text, task.one_label_a_row) for text in rows]) for rows in (own, wanted))
    probabilities = softmax(theirs)
    divergence = (probabilities * np.log(np.maximum(probabilities, 1e-12) / np.maximum(softmax(mine), 1e-12))).sum(1)
    return Agreement(mine.argmax(1) == theirs.argmax(1), probabilities.max(1), float(divergence.mean()))


def _choices(spans: Array, logits: Array, one_label_a_row: bool) -> Array:
    """Returns the logits of each choice: between the labels of a row, or between a label and its absence."""
    if one_label_a_row:
        return logits[spans[:, 0] >= 0]  # words without a token have no answer
    return np.column_stack([np.zeros(logits.size, dtype=logits.dtype), logits.ravel()])


def differing(data: Data, own: Sequence[Rows], wanted: Sequence[Rows]) -> list[dict[str, Any]]:
    """Returns texts with other answers than the checkpoint's, the surest first. Numbers and vectors all differ.

    A word without a token has no answer, and says nothing of how sure it is.
    """
    if data.task.served.is_number or data.task.served.is_vector:
        return []
    examples = data.dev.examples
    found = [
        {"text": shown(example), "checkpoint": ", ".join(theirs.labels), "tenant": ", ".join(mine.labels), "sure": sure}
        for example, mine, theirs in zip(
            examples, *(data.task.answers(data.labels, examples, rows) for rows in (own, wanted)), strict=True
        )
        if mine.labels != theirs.labels and (sure := round(float(theirs.scores[theirs.scores > 0].min(initial=1.0)), 3))
    ]
    return sorted(found, key=lambda one: -one["sure"])[:WORST]
