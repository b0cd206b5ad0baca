"""Evaluates the newest version of a tenant on a labelled file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builder.store.store import Store, TenantFile
from builder.training.bodies import PlotBody
from builder.training.examples import Reader, Texts
from builder.training.finetuning import Ground, answers_to
from builder.training.labelled import Labelled
from builder.training.labels import check_labels
from builder.training.model import TenantModel
from builder.training.scores import Scores
from builder.training.tasks import training_task
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from hplm.model.eightbit import to_eight_bits

Weights = tuple[list[dict[str, Tensor]] | None, dict[str, Tensor]]  # of the adapter, layer by layer, and the head


@dataclass(frozen=True)
class Evaluation:
    tenant: TenantFile
    labelled: Labelled
    texts: Texts
    answers: list[list[str]]
    scores: Scores

    def described(self) -> dict[str, Any]:
        tenant = self.tenant
        return {
            "tenant": tenant.id,
            "version": tenant.version,
            "task": tenant.task,
            "file": str(self.labelled.path),
            "texts": len(self.texts.examples),
            "texts_cut": self.texts.cut,
            "windows_found": self.texts.found,
            **self.scores.described(),
        }


def evaluate_tenant(
    store: Store,
    tenant_id: str,
    file: Path,
    device: torch.device | None = None,
    show_progress: bool = True,
    eight_bits: bool = False,
) -> Evaluation:
    """`eight_bits`: computes the shared products in 8 bits, on the CPU."""
    device = device or resolve_device("auto")
    tenant = find_tenant(store, tenant_id)
    labelled = training_task(tenant.task).read(file)
    check_labels(labelled, tenant.labels, f"the training data of tenant {tenant_id!r}")
    return evaluate_weights(store, tenant, store.tenant_weights(tenant), labelled, device, show_progress, eight_bits)


def evaluate_weights(
    store: Store,
    tenant: TenantFile,
    weights: Weights,
    labelled: Labelled,
    device: torch.device,
    show_progress: bool = True,
    eight_bits: bool = False,
) -> Evaluation:
    """Evaluates a tenant that need not be stored yet."""
    reader, task = Reader(store, tenant.domain, tenant.domain_version), training_task(tenant.task)
    texts = reader.read(labelled, task, tenant.labels, show_progress)
    model = TenantModel(tenant.adapter_layout(store.config), tenant.head_layout(store.config), seed=0)
    model.load(*weights)
    ground = Ground(store.config, reader, texts, texts, task, tenant.labels, device)
    upper = store.upper()
    if eight_bits:
        to_eight_bits(upper.layers)
    body = PlotBody(upper.to(device).eval(), store.config.heads)
    answers, _ = answers_to(body, model.to(device), ground, texts)
    return Evaluation(tenant, labelled, texts, answers, task.score(tenant.labels, labelled.examples, answers))


def find_tenant(store: Store, tenant_id: str) -> TenantFile:
    tenant = store.tenant(tenant_id)
    if tenant is None:
        known = ", ".join(tenant.id for tenant in store.tenants()[:10]) or "none yet"
        raise InvalidInput(f"tenant {tenant_id!r} is not in {store.folder}: known are {known}")
    return tenant
