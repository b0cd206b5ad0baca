"""Teachers: models that answer a tenant's training texts first, so that it learns their soft answers beside the labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.importing.checkpoint import Family, Misfit, digest, is_checkpoint
from builder.learning.bodies import Body
from builder.store.store import Store
from builder.training.data import Data
from builder.training.finetuning import Trained, TrainingOptions, evaluate, finetune, logits_of
from builder.training.model import TenantModel
from hplm.errors import InvalidInput


def teacher_folder(name: str) -> Path:
    """Returns the folder of a checkpoint. Refuses what is none."""
    if not is_checkpoint(Path(name)):
        raise InvalidInput(f"--teacher {name}: give the folder of a checkpoint of the tenant's task")
    return Path(name).resolve()


def taught_by(
    checkpoint: Path, known_digest: str, store: Store, tenant_id: str, task: str, labels: Sequence[str]
) -> Callable[..., Trained]:
    """Returns a function like `finetune` that trains by a checkpoint's answers too. The checkpoint is in memory from now on.

    Refuses one of another task or with other labels, and one that has changed since `known_digest`. Where the tenant was
    imported from it with `--labels`, these are its labels.
    """
    asked = (store.report(store.tenant_version(tenant_id, v)).get("asked", {}) for v in store.tenant_versions(tenant_id))
    named = next((own.get("labels") for own in asked if own.get("checkpoint") == known_digest), None)
    try:
        found = Family(store.model, store.config).read(checkpoint, named, task)
    except Misfit as misfit:
        raise InvalidInput(
            f"--teacher {checkpoint}: {misfit.reason}: give one that was fine-tuned from the store's model"
        ) from None
    if digest(checkpoint) != known_digest:
        raise InvalidInput(f"--teacher {checkpoint} changes while it is read: wait until it is written, and try again")
    if found.head.task != task:
        raise InvalidInput(f"--teacher {checkpoint} has learned to {found.head.task}, but the tenant is to {task}")
    if apart := {*found.labels} ^ {*labels}:
        names = ", ".join(sorted(apart)[:5])
        raise InvalidInput(
            f"--teacher {checkpoint} and the tenant must have the same labels, and only one of them has {names}: name them in "
            "the checkpoint's id2label"
        )
    teacher = found.with_labels([*labels])

    def trained(body: Body, data: Data, options: TrainingOptions, saved: Path | None = None) -> Trained:
        whole, model = teacher.loaded(data.device)
        scores, _ = evaluate(whole, model, data, data.dev)
        told = {"dev": round(scores.main, 4), "checkpoint": str(checkpoint)}
        return taught(body, data, options, saved, (whole, model), told)

    return trained


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
