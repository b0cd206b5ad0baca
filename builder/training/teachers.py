"""Teachers: models that answer a tenant's training texts first, so that it learns their soft answers beside the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.importing.checkpoint import Family, Finetuned, Misfit, digest, is_checkpoint
from builder.learning.bodies import Body
from builder.store.store import Store
from builder.training.data import Data
from builder.training.finetuning import Trained, TrainingOptions, evaluate, finetune, logits_of
from builder.training.model import TenantModel
from hplm.errors import InvalidInput


@dataclass(frozen=True)
class Teacher:
    """Trains tenants, like `finetune`, by its answers too."""

    checkpoint: Path  # a model that was fine-tuned
    found: Finetuned | None = None  # what was read of it

    @classmethod
    def named(cls, name: str) -> Teacher:
        if not is_checkpoint(Path(name)):
            raise InvalidInput(f"--teacher {name}: give the folder of a checkpoint of the tenant's task")
        return cls(Path(name).resolve())

    @property
    def digest(self) -> str:
        """Returns a digest of the checkpoint's files, by which the same training is known again."""
        return digest(self.checkpoint)

    def read(self, store: Store, tenant_id: str, task: str, labels: Sequence[str], digest: str) -> Teacher:
        """Returns it with its checkpoint in memory, before anything of an earlier training is removed.

        Refuses one of another task or with other labels, and one that has changed since `digest`. Where the tenant was
        imported from it with `--labels`, these are its labels.
        """
        asked = (store.report(store.tenant_version(tenant_id, v)).get("asked", {}) for v in store.tenant_versions(tenant_id))
        named = next((own.get("labels") for own in asked if own.get("checkpoint") == digest), None)
        try:
            found = Family(store.model, store.config).read(self.checkpoint, named, task)
        except Misfit as misfit:
            raise InvalidInput(
                f"--teacher {self.checkpoint}: {misfit.reason}: give one that was fine-tuned from the store's model"
            ) from None
        if self.digest != digest:
            raise InvalidInput(f"--teacher {self.checkpoint} changes while it is read: wait until it is written, and try again")
        if found.head.task != task:
            raise InvalidInput(f"--teacher {self.checkpoint} has learned to {found.head.task}, but the tenant is to {task}")
        if apart := {*found.labels} ^ {*labels}:
            names = ", ".join(sorted(apart)[:5])
            raise InvalidInput(
                f"--teacher {self.checkpoint} and the tenant must have the same labels, and only one of them has {names}: "
                "name them in the checkpoint's id2label"
            )
        return replace(self, found=found.with_labels(list(labels)))

    def __call__(self, body: Body, data: Data, options: TrainingOptions, saved: Path | None = None) -> Trained:
        """Trains by the labels and by the teacher's answers. The same call after an interruption goes on."""
        assert self.found is not None  # it was read
        whole, model = self.found.loaded(data.device)
        scores, _ = evaluate(whole, model, data, data.dev)
        told = {"dev": round(scores.main, 4), "checkpoint": str(self.checkpoint)}
        return taught(body, data, options, saved, (whole, model), told)


def taught(
    body: Body, data: Data, options: TrainingOptions, saved: Path | None, teacher: tuple[Body, TenantModel],
    teacher_report: dict[str, Any],
) -> Trained:  # fmt: skip
    """Trains by the labels and by a teacher's answers. `teacher_report`: what the report says of the teacher."""
    logits = logits_of(*teacher, data, data.train)
    _, spread = data.task.scale(data.train.examples)

    def apart(chosen: np.ndarray, answers: Tensor) -> Tensor:
        """Returns how far the tenant's answers are from the teacher's."""
        wanted = torch.from_numpy(np.concatenate([logits[i] for i in chosen])).to(answers.device)
        return data.task.apart(answers, wanted, spread)

    trained = finetune(body, data, options, saved, apart)
    return replace(trained, report={"teacher": teacher_report, **trained.report})
