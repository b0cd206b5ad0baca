"""Profiles the plans of a tenant on labelled texts that its training has not seen (Tabi, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from builder.cascade.candidates import Measured, candidates
from builder.cascade.kept import Kept
from builder.cascade.levels import StoredLevel
from builder.cascade.profile import Profile, described, read_profile, save_profile
from builder.cascade.selection import front_of
from builder.cascade.workload import Workload
from builder.evaluation.unseen import unseen, used_files
from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import check_file
from builder.training.examples import Reader
from builder.training.labels import check_labels
from builder.training.tasks import training_task
from hplm.engine.engine import Precision
from hplm.errors import InvalidInput


def profile_tenant(
    store: Store,
    tenant: TenantFile,
    levels: Sequence[StoredLevel],
    file: Path,
    precision: Precision,
    device: torch.device,
    seen: Sequence[Path] = (),
    show_progress: bool = True,
) -> tuple[Profile, bool]:
    """Stores the profile beside the version. Returns it, and whether it is new: the same call again changes nothing.

    `levels`: the shallowest first, the tenant's own one last. `seen`: more files of texts to leave out, also moved ones.
    """
    task = training_task(tenant.task)
    _check(tenant, levels)
    check_file(file)
    used = list(used_files(store, tenant, seen))
    texts_of = {
        "texts": digest_of(file),
        "seen": sorted(map(digest_of, used)),
        "table": store.chain_digest(tenant.domain, tenant.domain_version),
        "precision": precision.name,
        "device": device.type,
    }
    asked = {**texts_of, "levels": described(levels)}
    known = read_profile(store, tenant)
    if known is not None and known.asked == asked:
        return known, False
    labelled = task.read(file)
    check_labels(labelled, tenant.labels, f"the training data of tenant {tenant.id!r}")
    fresh = unseen(labelled, (task.read(path) for path in used), f"tenant {tenant.id!r}", "a profile")
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
        "left_out": len(labelled.examples) - len(fresh.examples),
        "precision": precision.name,
        "levels": _level_reports(workload, measured),
        "tried": len(tried),
    }
    profile = Profile(front_of(tried), asked, report)
    save_profile(store, tenant, profile)
    answers.sweep()
    return profile, True


def _check(tenant: TenantFile, levels: Sequence[StoredLevel]) -> None:
    served = training_task(tenant.task).served
    if served.evidence is None or served.combined is None:
        raise InvalidInput(f"tenant {tenant.id!r} has the task {tenant.task}, whose answers have no confidence")
    if len(levels) < 2:
        raise InvalidInput(f"tenant {tenant.id!r} has no levels besides its own: make one with `hplm cascade build`")
    for level in levels[:-1]:
        if level.calibration is None:
            raise InvalidInput(f"level {level.name!r} of tenant {tenant.id!r} has no calibration: build it again")


def _level_reports(workload: Workload, measured: Measured) -> list[dict[str, Any]]:
    return [
        {
            "name": level.name,
            "layers": level.layers,
            "score": score,
            "mean_ms": round(1000 * float(seconds(workload.tokens).mean()), 4),
            "ms_by_tokens": {str(tokens): round(1000 * taken, 4) for tokens, taken in by_tokens.items()},
        }
        for level, score, seconds, by_tokens in zip(
            workload.levels, measured.scores, measured.seconds, workload.seconds, strict=True
        )
    ]
