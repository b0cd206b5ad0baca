"""What each task learns from: targets beside the rows a head reads, and a loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.training.labelled import Example

UNREAD = -1  # of a row whose word has no token, or an answer that was cut off: never learned from, always counted as wrong


def targets_of(task: str, example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """One a row for `classify` and `tag`; 1 x labels for `multilabel`; 1 x 1 for `regress`; two rows for `span`."""
    if task == "multilabel":
        holds = np.zeros((1, len(number_of)), dtype=np.float32)
        holds[0, [number_of[label] for label in example.labels]] = 1
        return holds
    if task == "regress":
        return np.array([[example.value]], dtype=np.float32)
    if task == "span":
        return _ends(example.answers[0], spans)
    numbers = np.array([number_of[label] for label in example.labels], dtype=np.int64)
    return np.where(spans[:, 0] == UNREAD, UNREAD, numbers)


def _ends(answer: tuple[int, int], spans: np.ndarray) -> np.ndarray:
    """The rows of the tokens in which the answer starts and ends."""
    start, stop = answer
    covered = np.flatnonzero((spans[:, 2] > start) & (spans[:, 1] < stop))
    cut_off = not len(covered) or spans[-1, 2] < stop
    return np.array([UNREAD, UNREAD] if cut_off else [covered[0], covered[-1]], dtype=np.int64)


def loss_of(task: str, logits: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
    """The sum over what is learned from, and how much that is. `scale`: the spread of values."""
    if task == "multilabel":
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum"), targets.numel()
    if task == "regress":
        return F.mse_loss(logits / scale, targets / scale, reduction="sum"), len(targets)
    if task == "span":
        ends = targets.view(-1, 2)
        losses = [
            F.cross_entropy(own.T, wanted, ignore_index=UNREAD, reduction="sum")
            for own, wanted in zip(logits.split(rows_of), ends, strict=True)
        ]
        return torch.stack(losses).sum(), int((ends != UNREAD).sum())
    learned = int((targets != UNREAD).sum())
    return F.cross_entropy(logits, targets, ignore_index=UNREAD, reduction="sum"), learned
