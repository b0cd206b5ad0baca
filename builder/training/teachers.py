"""Teachers: models that answer a tenant's training texts first, so that it learns their soft answers beside the labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.importing.checkpoint import CONFIG, Family, is_checkpoint, weight_files
from builder.learning.bodies import Body, WholeBody
from builder.store.resumable import digest_of
from builder.tasks.lookup import Pack
from builder.training.data import Data
from builder.training.finetuning import BODY_RATE, HEAD_RATE, Trained, TrainingOptions, evaluate, finetune, logits_of
from builder.training.model import TenantModel
from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint

DEDICATED = "dedicated"  # a BERT that is fine-tuned in full on the same data


@dataclass(frozen=True)
class Teacher:
    """Is called like `finetune`."""

    checkpoint: Path | None = None  # a model that was fine-tuned; None: one is fine-tuned here

    @classmethod
    def named(cls, name: str) -> Teacher:
        if name == DEDICATED:
            return cls()
        if not is_checkpoint(Path(name)):
            raise InvalidInput(f"--teacher {name}: give {DEDICATED}, or the folder of a checkpoint of the tenant's task")
        return cls(Path(name))

    @property
    def digest(self) -> str:
        """What a training depends on."""
        return DEDICATED if self.checkpoint is None else digest_of(self.checkpoint / CONFIG, *weight_files(self.checkpoint))

    def __call__(
        self, body: Body, data: Data, options: TrainingOptions, saved: Path | None = None, show_progress: bool = True
    ) -> Trained:
        """Trains by the labels and by the teacher's answers. The same call after an interruption goes on."""
        whole, model, told = self._made(data, options, saved, show_progress)
        logits, _ = logits_of(whole, model, data, data.train)
        answers = {id(text): torch.from_numpy(rows) for text, rows in zip(data.train.texts, logits, strict=True)}
        _, spread = data.task.scale(data.train.examples)

        def apart(pack: Pack, own: Tensor) -> Tensor:
            """Returns how far the tenant's answers are from the teacher's."""
            wanted = torch.cat([answers[id(text)] for text in pack.texts]).to(own.device)
            return data.task.apart(own, wanted, spread)

        trained = finetune(body, data, options, saved, show_progress, apart)
        return replace(trained, report={"teacher": told, **trained.report})

    def _made(
        self, data: Data, options: TrainingOptions, saved: Path | None, show_progress: bool
    ) -> tuple[Body, TenantModel, dict[str, Any]]:
        """Returns the teacher, and what a report says of it."""
        if self.checkpoint is None:
            file = saved.with_name(f"teacher-{saved.name}") if saved is not None else None
            alone = replace(options, adapter=TrainingOptions.adapter, rank=0, places=None)
            made = dedicated(data, replace(alone, learning_rate=HEAD_RATE, body_rate=BODY_RATE), file, show_progress)
            return made.body, made.model, {"dev": round(made.scores.main, 4), "seconds": made.report["seconds"]}
        found = Family(data.reader.store.model, data.config).read(self.checkpoint)
        if found.head.task != data.task.served.name or {*found.labels} != {*data.labels}:
            raise InvalidInput(
                f"--teacher {self.checkpoint}: it has the task {found.head.task} with {', '.join(found.labels[:10])}, and the "
                f"tenant {data.task.served.name} with {', '.join(data.labels[:10])}: both must have the same labels"
            )
        found = found.with_labels(data.labels)
        model = TenantModel(None, found.head_layout, seed=0)
        model.load(None, found.head.weights)
        body, model = WholeBody(found.checkpoint).to(data.device).eval().requires_grad_(False), model.to(data.device)
        scores, _ = evaluate(body, model, data, data.dev)
        return body, model, {"dev": round(scores.main, 4), "checkpoint": str(self.checkpoint)}


def dedicated(data: Data, options: TrainingOptions, saved: Path | None, show_progress: bool) -> Trained:
    """Returns a BERT that was fine-tuned in full."""
    model, config = data.reader.store.model, data.config
    whole = WholeBody(load_checkpoint(model, config.name, config.lower_layers, config.upper_layers, config.window))
    return finetune(whole, replace(data, start=None), options, saved, show_progress)
