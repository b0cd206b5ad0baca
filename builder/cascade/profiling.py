"""Profiles the plans of a tenant on labelled texts that its training has not seen (Tabi, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from builder.cascade.candidates import Measured, candidates
from builder.cascade.kept import Kept
from builder.cascade.levels import OpenLevel
from builder.cascade.profile import FORMAT, Profile, described, read_profile, save_profile
from builder.cascade.selection import best_of_each
from builder.cascade.workload import Workload
from builder.evaluation.unseen import UnseenTexts
from builder.store.store import Store, TenantFile
from builder.training.examples import Reader
from builder.training.tasks import training_task
from hplm.engine.engine import Precision
from hplm.errors import InvalidInput


def profile_tenant(
    store: Store,
    tenant: TenantFile,
    levels: Sequence[OpenLevel],
    file: Path,
    precision: Precision,
    device: torch.device,
    seen: Sequence[Path] = (),
    show_progress: bool = True,
    again: bool = False,
) -> tuple[Profile, bool]:
    """Stores the profile beside the version. Returns it, and whether it is new: the same call again changes nothing.

    `levels`: the shallowest first, the tenant's own one last. `seen`: more files of texts to leave out, also moved ones.
    `again`: measures the levels' times once more, also if everything else is the same.
    """
    _check(tenant, levels)
    unseen = UnseenTexts(store, tenant, file, seen, "a profile")
    task = unseen.task
    texts_of = {
        "texts": unseen.digest,
        "seen": unseen.seen,
        "table": store.chain_digest(tenant.domain, tenant.domain_version),
        "precision": precision.name,
        "device": device.type,
    }
    asked = {**texts_of, "format": FORMAT, "levels": described(levels)}
    known = read_profile(store, tenant)
    if known is not None and known.asked == asked and not again:
        return known, False
    fresh = unseen.fresh
    reader = Reader(store, tenant.domain, tenant.domain_version)
    texts = reader.read(fresh, task, tenant.labels, show_progress)
    answers = Kept(store.tenant_folder(tenant.id, tenant.version), texts_of)
    workload = Workload(tenant, task, levels, fresh, reader, texts, precision, device, answers)
    measured = workload.measured()
    tried = list(tqdm(candidates(measured), desc="trying plans", unit="plan", disable=not show_progress))
    report = {
        "tenant": tenant.id,
        "version": tenant.version,
        "task": tenant.task,
        "metric": task.score(tenant.labels, measured.examples, measured.answers[-1]).metric,
        "file": str(file),
        "texts": len(fresh.examples),
        "left_out": unseen.left_out,
        "precision": precision.name,
        "levels": _level_reports(workload, measured),
        "tried": len(tried),
    }
    profile = Profile(best_of_each(tried, len(levels) - 1), asked, report)
    save_profile(store, tenant, profile)
    answers.sweep()
    return profile, True


def _check(tenant: TenantFile, levels: Sequence[OpenLevel]) -> None:
    served = training_task(tenant.task).served
    if served.evidence is None or served.combined is None:
        raise InvalidInput(f"tenant {tenant.id!r} has the task {tenant.task}, whose answers have no confidence")
    if len(levels) < 2:
        raise InvalidInput(f"tenant {tenant.id!r} has no levels besides its own: make one with `hplm cascade build`")


def _level_reports(workload: Workload, measured: Measured) -> list[dict[str, Any]]:
    return [
        {
            "name": level.name,
            "layers": level.layers,
            "score": score,
            "mean_ms": round(1000 * float(measured.alone(number).mean()), 4),
            "sheets": times.stored(),
        }
        for number, (level, score, times) in enumerate(zip(workload.levels, measured.scores, measured.times, strict=True))
    ]
