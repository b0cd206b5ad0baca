"""Calibrates the newest version of a tenant on labelled texts that its training has not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.evaluation.tenant import find_tenant, opened
from builder.evaluation.unseen import FEWEST, unseen, used_files
from builder.store.calibrations import Calibrated, read_calibrated, save_calibrated
from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import check_file
from builder.training.finetuning import rows_of
from builder.training.labelled import Labelled
from builder.training.labels import check_labels
from builder.training.tasks import TrainingTask, training_task
from hplm.engine.engine import Precision
from hplm.errors import Broken, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.levels.evidence import Evidence
from hplm.levels.fitting import Cases, fitted
from hplm.levels.reliability import Bin, bins_of, calibration_error

WIDTH = 0.5  # the default of delta, in standard deviations of the values


def calibrate_tenant(
    store: Store,
    tenant_id: str,
    file: Path,
    precision: Precision,
    device: torch.device,
    delta: float | None = None,
    seen: Sequence[Path] = (),
    show_progress: bool = True,
) -> tuple[Calibrated, bool]:
    """Stores the calibration beside the version. Returns it, and whether it is new: the same call again changes nothing.

    Texts that occur in the training or dev data of the version, or of those that it was trained on, are left out.
    `delta`: for numbers, the largest error of a right one. `seen`: more files of such texts, also moved ones.
    """
    tenant = find_tenant(store, tenant_id)
    task = training_task(tenant.task)
    _check(tenant, task, delta)
    check_file(file)
    used = list(used_files(store, tenant, seen))
    asked = {"texts": digest_of(file), "precision": precision.name, "delta": delta, "seen": sorted(map(digest_of, used))}
    known = read_calibrated(store, tenant)
    if known is not None and known.asked == asked:
        return known, False
    labelled = task.read(file)
    check_labels(labelled, tenant.labels, f"the training data of tenant {tenant_id!r}")
    fresh = unseen(labelled, (task.read(path) for path in used), f"tenant {tenant_id!r}", "a calibration")
    if task.is_number and delta is None:
        delta = WIDTH * float(np.std([example.value for example in fresh.examples]))
        if not delta:
            raise InvalidInput(f"{file}: every value is the same: give different ones, or --delta")
    cases = _cases(store, tenant, task, fresh, precision, device, delta, show_progress)
    if len(cases) < FEWEST:
        raise InvalidInput(f"{file}: {len(cases):,} of its texts have words that can be read: give {FEWEST} or more")
    found = fitted(cases, delta)
    report = {
        "tenant": tenant_id,
        "version": tenant.version,
        "task": tenant.task,
        "file": str(file),
        "texts": len(cases),
        "left_out": len(labelled.examples) - len(fresh.examples),
        "precision": precision.name,
        "delta": delta,
        "right": round(float(cases.right.mean()), 4),
        "before": None if task.is_number else _described(cases.confidences(Calibration()), cases.losses(Calibration()), cases),
        "after": _described(found.confidences, found.losses, cases),
    }
    calibrated = Calibrated(found.calibration, asked, report)
    save_calibrated(store, tenant, calibrated)
    return calibrated, True


def _check(tenant: TenantFile, task: TrainingTask, delta: float | None) -> None:
    if task.served.evidence is None or (task.right_class is None and task.is_right is None):
        raise InvalidInput(f"tenant {tenant.id!r} has the task {tenant.task}, whose answers have no confidence")
    if delta is None:
        return
    if not task.is_number:
        raise InvalidInput(f"delta {delta:g} is for numbers, but tenant {tenant.id!r} has the task {tenant.task}: leave it out")
    if not 0 < delta < math.inf:
        raise InvalidInput(f"delta {delta:g}: give a number above 0")


def _described(confidences: np.ndarray, losses: np.ndarray, cases: Cases) -> dict[str, Any]:
    bins = bins_of(confidences, cases.right)
    return {
        "ece": round(calibration_error(bins), 4),
        "nll": round(float(losses.mean()), 4),
        "bins": [asdict(one) for one in bins],
    }


def reported_bins(described: dict[str, Any]) -> list[Bin]:
    return [Bin(**one) for one in described["bins"]]


def _cases(
    store: Store,
    tenant: TenantFile,
    task: TrainingTask,
    labelled: Labelled,
    precision: Precision,
    device: torch.device,
    delta: float | None,
    show_progress: bool,
) -> Cases:
    labels, served = tenant.labels, task.served
    body, model, ground = opened(store, tenant, store.tenant_weights(tenant), labelled, device, precision, show_progress)
    evidence: list[Evidence] = []
    right: list[bool] = []
    classes: list[int] = []
    for (spans, logits), example in zip(rows_of(body, model, ground, ground.texts)[0], ground.texts.examples, strict=True):
        if not np.isfinite(logits).all():
            raise Broken(f"tenant {tenant.id!r} has logits that are not finite: train it again, with a lower rate")
        own = served.evidence(logits, spans, labels) if served.evidence is not None else None
        if own is None:
            continue  # no word of it can be read
        evidence.append(own)
        if task.right_class is not None:
            classes.append(task.right_class(example, own, labels))
            right.append(classes[-1] == own.chosen[0])
        elif task.is_right is not None:
            answer = served.answer(logits, spans, labels, passage=example.pair or "")
            right.append(task.is_right(example, answer, delta or 0.0))
    return Cases.of(evidence, right, classes if task.right_class is not None else None)
