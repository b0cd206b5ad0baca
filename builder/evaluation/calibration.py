"""Calibrates the newest version of a tenant on labelled texts that its training has not seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.evaluation.evaluation import opened
from builder.evaluation.fitting import Cases, calibration_error, fitted
from builder.evaluation.unseen import FEWEST, UnseenTexts
from builder.learning.bodies import PlotBody
from builder.store.step import Step
from builder.store.store import Store, TenantVersion
from builder.tables.build_folder import locked_tenant
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from builder.training.finetuning import logits_of
from builder.training.model import TenantModel
from hplm.calibration import Calibration, Evidence
from hplm.engine.engine import Precision
from hplm.errors import Broken, InvalidInput


def calibrate_tenant(
    store: Store, tenant_id: str, file: Path, precision: Precision, device: torch.device, columns: Columns = AS_TRAINED
) -> tuple[dict[str, Any], bool]:
    """Stores a next version with a calibration. Returns the report, and whether it is new: the same call changes nothing."""
    with locked_tenant(store, tenant_id):
        tenant = store.known_tenant(tenant_id)
        seen = store.seen(tenant)
        columns = columns.after(store.report(tenant))
        texts = UnseenTexts(tenant, file, seen.learned | seen.dev, "a calibration", columns=columns)
        found = store.knowledge(tenant)
        if found.students is not None:
            raise InvalidInput(
                f"tenant {tenant_id!r} is answered by students: those of `classify` are calibrated when they are made, and "
                "others have no confidence"
            )
        step = Step(store, tenant_id, "calibration", {"texts": texts.digest, "precision": precision.name})
        if (known := step.done()) is not None:
            return known, False
        read = opened(store, found, texts.fresh, device, precision)
        cases = _cases(tenant, texts.task, *read)
        if len(cases) < FEWEST:
            raise InvalidInput(f"{file}: {len(cases):,} of its texts have words that can be read: give {FEWEST} or more")
        fit = fitted(cases)
        plain = Calibration()
        own = {
            "tenant": tenant.id, "version": tenant.version + 1, "task": tenant.task, "file": str(file), "texts": len(cases),
            "left_out": texts.left_out, "precision": precision.name, "right": round(float(cases.right.mean()), 4),
            "before": _described(cases.confidences(plain), cases.losses(plain), cases),
            "after": _described(fit.confidences, fit.losses, cases),
        }  # fmt: skip
        step.finish(own, partial(store.save_next, tenant, replace(found, calibration=fit.calibration)))
        return own, True


def _described(confidences: np.ndarray, losses: np.ndarray, cases: Cases) -> dict[str, Any]:
    return {"ece": round(calibration_error(confidences, cases.right), 4), "nll": round(float(losses.mean()), 4)}


def _cases(tenant: TenantVersion, task: TrainingTask, body: PlotBody, model: TenantModel, data: Data) -> Cases:
    """Returns the answers to texts of which a word can be read."""
    served, labels = task.served, tenant.labels
    assert served.evidence is not None  # as `UnseenTexts` checks
    found: list[Evidence] = []
    right: list[bool] = []
    classes: list[int] = []
    rows = data.rows(data.dev, logits_of(body, model, data, data.dev))
    for (spans, logits), example in zip(rows, data.dev.examples, strict=True):
        if not np.isfinite(logits).all():
            raise Broken(f"tenant {tenant.id!r} has logits that are not finite: train it again, with a lower rate")
        if (own := served.evidence(logits, spans, labels)) is None:
            continue
        found.append(own)
        if task.right_class is not None:
            classes.append(task.right_class(example, own, labels))
            right.append(classes[-1] == int(own.chosen[0]))
        else:
            assert task.is_right is not None  # likewise
            right.append(task.is_right(example, served.answer(logits, spans, labels, passage=example.pair or "")))
    return Cases.of(found, right, classes if task.right_class is not None else None)
