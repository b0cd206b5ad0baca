"""Whether an answer is right, one function a task: what a calibration learns from."""

from __future__ import annotations

from collections.abc import Sequence

from builder.tasks.examples import Example
from builder.tasks.scores import span_scores
from hplm.levels.evidence import Evidence
from hplm.tasks import TextAnswer


def right_label(example: Example, evidence: Evidence, labels: Sequence[str]) -> int:
    """Returns the number of the right label, of the word that the evidence is about."""
    return labels.index(example.labels[evidence.about])


def right_holding(example: Example, evidence: Evidence, labels: Sequence[str]) -> int:
    """Returns 1 if the label that the evidence is about holds."""
    return int(labels[evidence.about] in example.labels)


def is_near(example: Example, answer: TextAnswer, delta: float) -> bool:
    return abs(float(answer.logits[0, 0]) - example.value) <= delta


def is_exact(example: Example, answer: TextAnswer, delta: float) -> bool:
    """Whether the answer is one of the right ones, or rightly none, without articles and punctuation."""
    return span_scores((), [example], [answer.labels]).values["exact_match"] == 1
