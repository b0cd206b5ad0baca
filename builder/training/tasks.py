"""How a tenant of each task learns and is scored: one object a task, beside the one in `hplm/tasks.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from builder.training.labelled import (
    Example,
    Labelled,
    ReadLine,
    read_answers,
    read_label,
    read_labelled,
    read_labels,
    read_tags,
    read_value,
)
from builder.training.labels import check_values, labels_in, mean_and_spread
from builder.training.objectives import (
    end_loss,
    end_targets,
    holding_loss,
    holding_targets,
    label_loss,
    label_targets,
    value_loss,
    value_targets,
)
from builder.training.scores import Labels, Scores, holding_scores, label_scores, span_scores, tag_scores, value_scores
from hplm.errors import InvalidInput
from hplm.tasks import TASKS, Task, find_task


def _any_labels(labelled: Labelled, dtype: str) -> None:
    """Labels are checked when they are collected."""


def _unscaled(examples: Sequence[Example]) -> tuple[float, float]:
    return 0.0, 1.0


@dataclass(frozen=True)
class TrainingTask:
    served: Task
    read_line: ReadLine  # of a labelled file
    targets: Callable[[Example, np.ndarray, Mapping[str, int]], np.ndarray]  # of an example, its rows, the labels' numbers
    loss: Callable[[Tensor, Tensor, list[int], float], tuple[Tensor, int]]  # of logits, targets, rows a text, and `scale`
    score: Callable[[Labels, Sequence[Example], Sequence[Labels]], Scores]  # of the labels, examples, and their answers
    fewest_labels: int = 2  # that the training data must have, where labels are not fixed
    one_label_a_row: bool = False  # every row has one right label, so that a table can show which is taken for which
    check: Callable[[Labelled, str], None] = _any_labels  # of the part to learn from, and the dtype that the head is stored in
    scale: Callable[[Sequence[Example]], tuple[float, float]] = _unscaled  # mean and spread of what the head has to say

    def read(self, path: Path) -> Labelled:
        return read_labelled(path, self.read_line)

    def labels(self, labelled: Labelled) -> list[str]:
        """What the outputs of the tenant's head stand for."""
        return list(self.served.fixed_labels) or labels_in(labelled, self.fewest_labels)


def training_task(name: str) -> TrainingTask:
    task = find_task(name)
    if task.name not in TRAINING_TASKS:
        raise InvalidInput(f"task {name!r} is served and cannot be trained: choose {', '.join(TRAINING_TASKS)}")
    return TRAINING_TASKS[name]


TRAINING_TASKS: dict[str, TrainingTask] = {
    task.served.name: task
    for task in (
        TrainingTask(TASKS["classify"], read_label, label_targets, label_loss, label_scores, one_label_a_row=True),
        TrainingTask(TASKS["multilabel"], read_labels, holding_targets, holding_loss, holding_scores, fewest_labels=1),
        TrainingTask(TASKS["tag"], read_tags, label_targets, label_loss, tag_scores, one_label_a_row=True),
        TrainingTask(
            TASKS["regress"], read_value, value_targets, value_loss, value_scores, check=check_values, scale=mean_and_spread
        ),
        TrainingTask(TASKS["span"], read_answers, end_targets, end_loss, span_scores),
    )
}
