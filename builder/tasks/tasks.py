"""The training and the scores of each task: one object a task, beside the one in `hplm/tasks/tasks.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from builder.tasks import losses, scores
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.examples import (
    Classified,
    Example,
    Line,
    ManyLabelled,
    Near,
    Question,
    Tagged,
    Valued,
    Written,
    first_line,
    fits,
    hash_of,
    read_labelled,
)
from builder.tasks.labels import check_answerable, check_near, check_values, labels_in, mean_and_spread
from builder.tasks.nearest import nearest
from builder.tasks.scores import Labels, Scores
from hplm.calibration import Evidence
from hplm.tasks.answers import TextAnswer
from hplm.tasks.tasks import TASKS, Task, find_task
from hplm.tenants.embedding import Embedding


def _unscaled(examples: Sequence[Example]) -> tuple[float, float]:
    return 0.0, 1.0


# Takes labels, examples, and the spans and logits of each; returns a number for each output.
Shift = Callable[[Sequence[str], Sequence[Example], Sequence[np.ndarray], Sequence[np.ndarray]], np.ndarray]
RightClass = Callable[[Example, Evidence, Sequence[str]], int]  # takes an example, what its answer rests on, and the labels
Rows = tuple[np.ndarray, np.ndarray]  # the spans and the logits of one example


@dataclass(frozen=True)
class TrainingTask:
    served: Task
    line: type[Line]  # of a labelled file
    targets: Callable[[Example, np.ndarray, Mapping[str, int]], np.ndarray]  # takes an example, its rows, the labels' numbers
    loss: Callable[[Tensor, Tensor, list[int], float], tuple[Tensor, int]]  # takes logits, targets, rows of each text, `scale`
    score: Callable[[Labels, Sequence[Example], Sequence[Labels]], Scores]  # takes labels, examples and their answers
    fewest_labels: int = 2  # in the training data, where labels are not fixed
    one_label_a_row: bool = False  # every row has one right label, so a confusion table makes sense
    check: Callable[[Sequence[Example], str], None] | None = None  # of the training part, for the dtype of the stored head
    scale: Callable[[Sequence[Example]], tuple[float, float]] = _unscaled  # mean and spread of the values
    shift: Shift | None = None  # what to add to a trained head's outputs
    right_class: RightClass | None = None  # for a calibration, where an answer's evidence is one choice between classes
    is_right: Callable[[Example, TextAnswer], bool] | None = None  # where it is something else
    # How far an exit's outputs are from the full stack's: rows of both. None: the task has no exits.
    distance: Callable[[Tensor, Tensor], Tensor] | None = None
    # Takes examples and the rows of each, and returns their answers. None: each is read by itself, as it is served.
    read_together: Callable[[Sequence[Example], Sequence[Rows]], list[TextAnswer]] | None = None
    embedding: Embedding | None = None  # of the tenant that learns; None: its task has heads
    batch_texts: int | None = None  # of a step; None: as the options say

    def of(self, embedding: Embedding | None) -> TrainingTask:
        """Returns the task of a tenant that makes its vectors in this way."""
        if embedding is None:
            return self
        loss = partial(losses.near_loss, sizes=embedding.sizes) if self.loss is losses.near_loss else self.loss
        return replace(self, embedding=embedding, loss=loss)

    def texts_of(self, example: Example) -> list[tuple[str, str | None]]:
        """Returns the texts that are read of an example, each with its pair, if that is read with it."""
        if (own := self.embedding) is None:
            return [(example.text, example.pair)]
        if example.pair is None:  # of an unlabelled text: each prefix has some
            names = ["", *own.prefixes]
            return [(own.prefixed([example.text], names[hash_of(example) % len(names)])[0], None)]
        return [(own.prefixed([text], name)[0], None) for text, name in self.compared_in(example)]

    def compared_in(self, example: Example) -> list[tuple[str, str]]:
        """Returns the texts whose vectors are compared, each with the name of its prefix; "": the usual one."""
        assert self.embedding is not None  # it is known how they are made
        asking, answering = ("", "") if example.is_rated else self.embedding.sides
        texts = [(example.text, asking), (example.pair or "", answering), (example.negative, answering)]
        return texts if example.negative else texts[:2]

    def read(self, path: Path, columns: Columns = AS_TRAINED) -> list[Example]:
        return read_labelled(path, self.served.name, {name: task.line for name, task in TRAINING_TASKS.items()}, columns)

    def unlabelled(self) -> TrainingTask:
        """Returns the task of texts without labels: nothing is learned from them."""
        return replace(self, targets=losses.unread_targets, loss=losses.no_loss)

    def apart(self, logits: Tensor, wanted: Tensor, spread: float) -> Tensor:
        """Returns how far logits are from a teacher's. `spread`: of numbers."""
        if self.distance is None:
            return F.mse_loss(logits / spread, wanted / spread)
        return self.distance(logits, wanted)

    def answers(self, labels: Sequence[str], examples: Sequence[Example], rows: Sequence[Rows]) -> list[TextAnswer]:
        """Returns the answers that a client would get; to vectors, what they say of each other."""
        if self.read_together is not None:
            return self.read_together(examples, rows)
        return [
            self.served.answer(logits, spans, labels[: logits.shape[1]], passage=example.pair or "")  # some have no "no answer"
            for example, (spans, logits) in zip(examples, rows, strict=True)
        ]

    def labels(self, examples: Sequence[Example]) -> list[str]:
        """Returns the labels of the head's outputs; none of a task without a head."""
        if not self.served.has_head:
            return []
        fixed = list(self.served.fixed_labels)
        if not fixed:
            return labels_in(examples, self.fewest_labels)
        is_open = self.served.further_label and not all(example.answers for example in examples)  # some have no answer
        return [*fixed, self.served.further_label] if is_open else fixed


def task_in(path: Path, columns: Columns = AS_TRAINED) -> str:
    """Returns the first task whose form a file's first line has; `classify` if it has none."""
    line = first_line(path, columns)
    return next((name for name, task in TRAINING_TASKS.items() if fits(task.line, line)), "classify")


def training_task(name: str) -> TrainingTask:
    return TRAINING_TASKS[find_task(name).name]


TRAINING_TASKS: dict[str, TrainingTask] = {
    task.served.name: task
    for task in (
        TrainingTask(
            TASKS["classify"], Classified, losses.label_targets, losses.label_loss, scores.label_scores,
            one_label_a_row=True, right_class=scores.right_label, distance=losses.label_distance,
        ),
        TrainingTask(
            TASKS["multilabel"], ManyLabelled, losses.holding_targets, losses.holding_loss, scores.holding_scores,
            fewest_labels=1, right_class=scores.right_holding, distance=losses.holding_distance,
        ),
        TrainingTask(
            TASKS["tag"], Tagged, losses.label_targets, losses.label_loss, scores.tag_scores,
            one_label_a_row=True, right_class=scores.right_label, distance=losses.label_distance,
        ),
        TrainingTask(
            TASKS["regress"], Valued, losses.value_targets, losses.value_loss, scores.value_scores,
            check=check_values, scale=mean_and_spread,
        ),
        TrainingTask(
            TASKS["span"], Question, losses.end_targets, losses.end_loss, scores.span_scores,
            check=check_answerable, shift=scores.none_shift, is_right=scores.is_exact,
        ),
        TrainingTask(
            TASKS["embed"], Near, losses.near_targets, losses.near_loss, scores.near_scores,
            check=check_near, read_together=nearest, batch_texts=32,
        ),
        # Its loss needs the decoder's own matrix: `builder/training/generating.py` puts it there.
        TrainingTask(TASKS["generate"], Written, losses.written_targets, losses.no_loss, scores.written_scores),
    )
}  # fmt: skip
