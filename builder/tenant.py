"""A tenant: labelled data become an adapter and a head on top of a domain's tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from builder.data import Labelled, read_labelled
from builder.store import Store, TenantFile, check_name
from builder.training.examples import Reader, Texts, check_labels, labels_of, split_off
from builder.training.finetuning import TenantModel, TrainingOptions, evaluate, train
from builder.training.scores import Scores
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from hplm.tenants.snapshot import TASKS

DEV_SHARE = 0.1


def build_tenant(
    store: Store,
    tenant_id: str,
    domain: str,
    task: str,
    train_file: Path,
    dev_file: Path | None = None,
    adapter: str = "bottleneck",
    places: tuple[str, ...] | None = None,
    rank: int = 32,
    dtype: str = "fp16",
    epochs: int = 4,
    seed: int = 0,
    device: torch.device | None = None,
    show_progress: bool = True,
) -> TenantFile:
    """Trains the tenant, or its next version if it exists, and stores it with its report."""
    options = TrainingOptions(adapter=adapter, places=places, dtype=dtype, rank=rank, epochs=epochs, seed=seed)
    device = device or resolve_device("auto")
    check_name("tenant", tenant_id)
    if task not in TASKS:
        raise InvalidInput(f"task {task!r} is not known: choose {' or '.join(TASKS)}")
    if rank < 0:
        raise InvalidInput(f"rank {rank}: a positive number, or 0 for a head without adapter")
    if epochs < 1:
        raise InvalidInput(f"epochs {epochs}: at least 1")
    domain_version = store.latest(domain)

    given = read_labelled(train_file, task)
    labels = labels_of(given)
    before = next((tenant for tenant in store.tenants() if tenant.id == tenant_id), None)
    if before is not None:
        _check_same_answers(before, task, labels)
    if dev_file is None:
        training, dev = split_off(given, DEV_SHARE, seed)
    else:
        training, dev = given, read_labelled(dev_file, task)
        check_labels(dev, labels, str(train_file))

    reader = Reader(store, domain, domain_version)
    texts, dev_texts = (reader.read(part, task, labels, show_progress) for part in (training, dev))
    trained = train(
        store.upper(), store.config, reader, texts, dev_texts, task, len(labels), options, device, show_progress
    )
    version = before.version + 1 if before else 1
    tenant = TenantFile(
        tenant_id, version, domain, domain_version, task, labels, rank, adapter, places, dtype=dtype
    )
    report = {
        "task": task,
        "training": _described(training, texts),
        "dev": {**_described(dev, dev_texts), **_rounded(trained.scores)},
        **trained.report,
    }
    store.save_tenant(tenant, *trained.model.stored(), report)
    return tenant


def evaluate_tenant(
    store: Store, tenant_id: str, file: Path, device: torch.device | None = None, show_progress: bool = True
) -> dict[str, Any]:
    """What the newest version of a tenant scores on a labelled file."""
    device = device or resolve_device("auto")
    tenant = next((tenant for tenant in store.tenants() if tenant.id == tenant_id), None)
    if tenant is None:
        known = ", ".join(tenant.id for tenant in store.tenants()[:10]) or "none yet"
        raise InvalidInput(f"tenant {tenant_id!r} is not in {store.folder}: known are {known}")
    labelled = read_labelled(file, tenant.task)
    check_labels(labelled, tenant.labels, f"the training data of tenant {tenant_id!r}")
    reader = Reader(store, tenant.domain, tenant.domain_version)
    texts = reader.read(labelled, tenant.task, tenant.labels, show_progress)
    weights = store.tenant_weights(tenant)
    model = TenantModel(store.config, tenant.adapter_layout(store.config), tenant.head_layout(store.config), seed=0)
    model.load(*weights)
    scores = evaluate(store.upper().to(device).eval(), model.to(device), reader, texts, len(tenant.labels), device)
    described = {"tenant": tenant.id, "version": tenant.version, "task": tenant.task}
    return {**described, **_described(labelled, texts), **_rounded(scores)}


def _check_same_answers(before: TenantFile, task: str, labels: list[str]) -> None:
    """An update must not change what clients of the tenant know of it."""
    changed = []
    if task != before.task:
        changed.append(f"its task is {before.task}, not {task}")
    if added := sorted(set(labels) - set(before.labels)):
        changed.append(f"it does not have the labels {added}")
    if missing := sorted(set(before.labels) - set(labels)):
        changed.append(f"the data have no examples of its labels {missing}")
    if changed:
        raise InvalidInput(
            f"tenant {before.id!r} has a version {before.version} and an update keeps task and labels, but "
            f"{'; '.join(changed)}: build a tenant of another --id"
        )


def _described(labelled: Labelled, texts: Texts) -> dict[str, Any]:
    counts = Counter(label for example in labelled.examples for label in example.labels)
    return {
        "file": str(labelled.path),
        "texts": len(texts.texts),
        "texts_cut": texts.cut,
        "label_counts": dict(sorted(counts.items())),
        "windows_found": texts.found,
    }


def _rounded(scores: Scores) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(scores).items()}
