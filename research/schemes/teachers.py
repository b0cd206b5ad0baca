"""A tenant's dedicated BERT as its teacher: one that is fine-tuned in full on the same data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.learning.bodies import Body, WholeBody
from builder.training.data import Data
from builder.training.finetuning import Trained, TrainingOptions, finetune
from builder.training.teachers import taught

DEDICATED = "dedicated"
HEAD_RATE, BODY_RATE = 1e-3, 5e-5


def dedicated(data: Data, options: TrainingOptions, saved: Path | None) -> Trained:
    """Returns a BERT that was fine-tuned in full, with the rates for this."""
    alone = replace(options, adapter=TrainingOptions.adapter, rank=0, places=None, learning_rate=HEAD_RATE, body_rate=BODY_RATE)
    return finetune(WholeBody.of(data.reader.store), replace(data, start=None), alone, saved)


def taught_by_dedicated(body: Body, data: Data, options: TrainingOptions, saved: Path | None = None) -> Trained:
    """Trains by the labels and by the answers of a dedicated BERT, which is trained first."""
    made = dedicated(data, options, saved.with_name(f"teacher-{saved.name}") if saved is not None else None)
    told = {"dev": round(made.scores.main, 4), "seconds": made.report["seconds"]}
    return taught(body, data, options, saved, (made.body, made.model), told)
