"""Counts a tenant's wrong answers to its dev texts by label, and finds the worst ones."""

from __future__ import annotations

from typing import Any

import torch

from builder.tasks.examples import Example
from builder.tasks.scores import by_label
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from builder.training.finetuning import Trained, answers_to, logits_of

WORST, SHOWN = 10, 300  # mistakes, and characters of each text


def mistakes_of(trained: Trained, data: Data) -> dict[str, Any]:
    """Returns the part of a report that says how often each label is right, and the wrong answers with the largest loss."""
    task, texts = data.task, data.dev
    logits, _ = logits_of(trained.body, trained.model, data, texts)
    losses = [
        float(task.loss(torch.from_numpy(own), torch.from_numpy(text.targets), [len(own)], 1.0)[0]) / max(1, len(own))
        for own, text in zip(logits, texts.texts, strict=True)
        if text.window == 0
    ]
    examples, answers = texts.examples, answers_to(trained.body, trained.model, data, texts)[0]
    worst = []
    for number in sorted(range(len(answers)), key=lambda number: -losses[number]):
        right = _right(task, examples[number])
        answer = ", ".join(sorted(answers[number]) if not task.one_label_a_row else answers[number])
        if answer not in right and len(worst) < WORST:
            worst.append({"text": shown(examples[number]), "right": _cut(right[0]), "answered": _cut(answer)})
    known = [] if task.served.fixed_labels else by_label(data.labels, examples, answers, task.one_label_a_row)
    return {"by_label": known, "mistakes": worst}


def shown(example: Example) -> str:
    return _cut(example.text if example.pair is None else f"{example.text} | {example.pair}")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _right(task: TrainingTask, example: Example) -> list[str]:
    """Returns every right answer as a text."""
    if task.is_number:
        return [f"{example.value:g}"]
    if task.served.needs_pair:
        return [(example.pair or "")[start:stop] for start, stop in example.answers] or [""]
    return [", ".join(example.labels if task.one_label_a_row else sorted(example.labels))]
