"""A teacher: a BERT that is fine-tuned in full on the same data. A tenant then learns labels and its soft answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from builder.learning.bodies import Body, WholeBody
from builder.tasks.lookup import Pack
from builder.training.data import Data
from builder.training.finetuning import Trained, TrainingOptions, finetune, logits_of
from hplm.model.checkpoint import load_checkpoint

TEACHERS = ("dedicated",)
HEAD_RATE, BODY_RATE = 1e-3, 5e-5


def taught(body: Body, data: Data, options: TrainingOptions, saved: Path | None = None, show_progress: bool = True) -> Trained:
    """Trains as `finetune` does, after a teacher. The same call after an interruption continues with the one that learned."""
    model, config = data.reader.store.model, data.config
    whole = WholeBody(load_checkpoint(model, config.name, config.lower_layers, config.upper_layers, config.window))
    own = replace(options, adapter=TrainingOptions.adapter, rank=0, places=None, learning_rate=HEAD_RATE, body_rate=BODY_RATE)
    file = saved.with_name(f"teacher-{saved.name}") if saved is not None else None
    teacher = finetune(whole, replace(data, start=None), own, file, show_progress)
    logits, _ = logits_of(teacher.body, teacher.model, data, data.train)
    answers = {id(text): torch.from_numpy(rows) for text, rows in zip(data.train.texts, logits, strict=True)}
    _, spread = data.task.scale(data.train.examples)

    def apart(pack: Pack, own: Tensor) -> Tensor:
        """Returns how far the tenant's answers are from the teacher's."""
        wanted = torch.cat([answers[id(text)] for text in pack.texts]).to(own.device)
        return data.task.apart(own, wanted, spread)

    trained = finetune(body, data, options, saved, show_progress, apart)
    report = {"teacher": {"dev": round(teacher.scores.main, 4), "seconds": teacher.report["seconds"]}, **trained.report}
    return replace(trained, report=report)
