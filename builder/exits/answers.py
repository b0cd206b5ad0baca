"""What exits would answer to texts, beside the full stack: how sure they are, how often they agree, and what they lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from builder.exits.heads import States
from builder.exits.thresholds import Answered, Estimate
from builder.store.store import TenantVersion
from builder.tasks.examples import Example
from builder.tasks.tasks import TrainingTask
from hplm.arrays import Array
from hplm.calibration import Calibration
from hplm.model.config import BackboneConfig
from hplm.tasks.answers import TextAnswer, softmax

TEMPERATURES = np.geomspace(0.1, 20, 100)
LOOK = 0.03  # share of the layers' work that looking at an exit takes: measured in 8 bits, in batches of 2,000 tokens


def calibrations_for(task: TrainingTask, outputs: Sequence[Tensor], answers: Tensor, full: Calibration) -> list[Calibration]:
    """Returns a calibration for each exit, under which its probabilities are the likest to the full stack's calibrated ones."""
    assert task.distance is not None  # as the caller has checked
    distance, wanted = task.distance, answers / full.temperature
    return [_likeliest(lambda temperature, own=own: distance(own / temperature, wanted)) for own in outputs]


def calibration_by(examples: Sequence[Example], labels: Sequence[str], logits: Tensor) -> Calibration:
    """Returns the calibration of the full stack's labels, one a text, by the texts' own ones."""
    right = torch.tensor([labels.index(example.labels[0]) for example in examples])
    return _likeliest(lambda temperature: cross_entropy(logits / temperature, right))


def _likeliest(distance: Callable[[float], Tensor]) -> Calibration:
    best = min(TEMPERATURES.tolist(), key=lambda temperature: float(distance(temperature)))
    return Calibration(temperature=round(best, 6))


def answered_by(
    tenant: TenantVersion, task: TrainingTask, states: States, outputs: Sequence[Tensor], calibrations: Sequence[Calibration],
    full: Calibration, config: BackboneConfig,
) -> tuple[Answered, list[list[TextAnswer]]]:  # fmt: skip
    """Returns what is known about the answers of exits, and the answers themselves: of each exit, then of the full stack."""
    served, labels, texts = task.served, tenant.labels, len(states.rows_of)
    assert served.same is not None  # as the caller has checked
    own = [list(zip(states.of_texts(logits), states.spans, strict=True)) for logits in (*outputs, states.logits)]
    answers = [[served.answer(logits, spans, labels) for logits, spans in rows] for rows in own]
    pairs = zip(calibrations, own[:-1], strict=True)
    confidences = np.array([[served.confidence(calibration, *row, labels) for row in rows] for calibration, rows in pairs])
    agrees = np.array([[served.same(*pair) for pair in zip(one, answers[-1], strict=True)] for one in answers], dtype=bool)
    losses = 1.0 - agrees
    if served.read_each is not None:  # one label: the full stack's own probabilities say how much worse another one is
        probabilities = softmax(states.logits.numpy() / full.temperature)
        chosen = [logits.numpy().argmax(axis=1) for logits in (*outputs, states.logits)]
        losses = np.array([probabilities.max(axis=1) - probabilities[np.arange(texts), label] for label in chosen])
    rows = sum(states.rows_of) / float(states.lengths.sum())
    return Answered(confidences, agrees, losses, costs_of(config, rows), LOOK, states.lengths / states.lengths.sum()), answers


def costs_of(config: BackboneConfig, rows: float) -> Array:
    """Returns the share of the layers' work that a text takes until it leaves at each exit, and at the end.

    At the end only the rows that its head reads pass the rest of the last layer. `rows`: their share of the tokens.
    """
    attention = config.hidden * (config.query_width + 2 * config.key_width)
    rest = config.query_width * config.hidden + (3 if config.gated else 2) * config.hidden * config.intermediate
    costs = np.arange(config.upper_layers + 1, dtype=np.float64)
    costs[-1] -= (1 - rows) * rest / (attention + rest)
    return costs / costs[-1]


def lost_by(
    task: TrainingTask, examples: Sequence[Example], answers: Sequence[Sequence[TextAnswer]], exits: Array
) -> dict[str, Any]:
    """Returns the points lost by texts that leave, by their labels, and how far off that may be."""
    form = list if task.one_label_a_row else set  # each row has a label, or the labels have no order
    pairs = [zip(of_exit, examples, strict=True) for of_exit in answers]
    right = np.array([[form(answer.labels) == form(example.labels) for answer, example in own] for own in pairs], float)
    lost = Estimate.of(right[-1] - right[exits, np.arange(right.shape[1])])
    return {"points": lost.points, "off": lost.off, "full": round(100 * float(right[-1].mean()), 2)}
