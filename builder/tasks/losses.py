"""Targets and losses. `TRAINING_TASKS` says which belong to a task.

A function for targets takes one example. A loss returns the sum over all targets, and their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.tasks.examples import Example, hash_of

ASKS, IS_NEAR, IS_FAR, JUDGES = range(4)  # what a text is to its example; of a rated pair both judge
SCALE = 20.0  # of cosines: a difference of 0.1 is one of 2 nats
UNREAD = -1  # of a word without a token or an answer that was cut off: not learned, and counted as wrong


def label_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """Returns the number of the right label for each row."""
    numbers = np.array([number_of[label] for label in example.labels], dtype=np.int64)
    return np.where(spans[:, 0] == UNREAD, UNREAD, numbers)


def holding_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """Returns 1 x labels: 1 for each true label."""
    holds = np.zeros((1, len(number_of)), dtype=np.float32)
    holds[0, [number_of[label] for label in example.labels]] = 1
    return holds


def value_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """Returns the value, 1 x 1."""
    return np.array([[example.value]], dtype=np.float32)


def end_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """Returns the rows of the tokens in which the answer starts and ends.

    Both are the first row if the window does not have the whole answer; a head without an output for that learns nothing there.
    """
    none = 0 if len(number_of) > 2 else UNREAD
    start, stop = example.answers[0] if example.answers else (0, 0)
    covered = np.flatnonzero((spans[:, 2] > start) & (spans[:, 1] < stop))
    is_whole = len(covered) and spans[-1, 2] >= stop and (covered[0] > 1 or spans[1, 1] <= start)
    return np.array([covered[0], covered[-1]] if is_whole else [none, none], dtype=np.int64)


def near_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """Returns a row for each text of an example: what it is to the example, and what it and the asking text are, as hashes."""
    asking, near = hash_of(example, "text"), hash_of(example, "pair")
    texts = (ASKS, asking), (IS_NEAR, near), (IS_FAR, hash_of(replace(example, text=example.negative), "text"))
    rows = [[JUDGES if example.is_rated else what, own, asking] for what, own in texts]
    return np.array(rows, dtype=np.uint64).view(np.int64)  # torch compares only signed ones


def unread_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    return np.full(len(spans), UNREAD, dtype=np.int64)


def written_targets(example: Example, spans: np.ndarray, number_of: Mapping[str, int]) -> np.ndarray:
    """Returns the tokens to write, which stand in the spans of a prompt."""
    return spans[:, 1].astype(np.int64)


def label_loss(logits: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
    learned = int((targets != UNREAD).sum())
    return F.cross_entropy(logits, targets, ignore_index=UNREAD, reduction="sum"), learned


def holding_loss(logits: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum"), targets.numel()


def value_loss(logits: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
    """Returns the squared error; `scale` is the spread of the values."""
    return F.mse_loss(logits / scale, targets / scale, reduction="sum"), len(targets)


def end_loss(logits: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
    ends = targets.view(-1, 2)
    losses = [
        F.cross_entropy(_ends_of(own).T, wanted, ignore_index=UNREAD, reduction="sum")
        for own, wanted in zip(logits.split(rows_of), ends, strict=True)
    ]
    return torch.stack(losses).sum(), int((ends != UNREAD).sum())


def near_loss(
    vectors: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0, sizes: Sequence[int | None] = (None,)
) -> tuple[Tensor, int]:
    """Returns the cross-entropy of each asking text's positive among all positives and negatives, by their scaled cosines.

    A text that is the same as the positive, or near to the same text, is no wrong answer. `sizes`: the mean over vectors that
    are cut to so many dimensions.
    """
    what, own, asking = targets.unbind(1)
    asks, answers = what == ASKS, (what == IS_NEAR) | (what == IS_FAR)
    learned = int(asks.sum())
    right = (what[answers] == IS_NEAR).nonzero()[:, 0]
    if not learned or len(right) < learned:
        return vectors.new_zeros(()), 0
    near = (what[answers] == IS_NEAR) & (asking[answers] == own[asks][:, None])
    near |= own[answers] == own[answers][right][:, None]
    near[torch.arange(learned, device=near.device), right] = False
    losses: list[Tensor] = []
    for size in sizes:
        cut = F.normalize(vectors[:, :size].float(), dim=1)
        cosines = SCALE * cut[asks] @ cut[answers].T
        losses.append(F.cross_entropy(cosines.masked_fill(near, -torch.inf), right, reduction="sum"))
    return torch.stack(losses).mean(), learned


def no_loss(logits: Tensor, targets: Tensor, rows_of: list[int], scale: float = 1.0) -> tuple[Tensor, int]:
    return logits.new_zeros(()), 0


def label_distance(logits: Tensor, answers: Tensor) -> Tensor:
    """Returns the mean cross-entropy of an exit's labels with the full stack's probabilities."""
    return F.cross_entropy(logits, answers.softmax(dim=1))


def holding_distance(logits: Tensor, answers: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, answers.sigmoid())


def _ends_of(logits: Tensor) -> Tensor:
    """Returns the logits of start and end, rows x 2. The first row stands for no answer: half of its score each, or -inf."""
    none = logits[:1, 2:3] / 2 if logits.shape[1] > 2 else torch.full_like(logits[:1, :1], -torch.inf)
    return torch.cat([none.expand(1, 2), logits[1:, :2]])
