"""Tenants of tasks that the toy does not have: several labels, a number, a piece of a passage."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantFile
from hplm.levels.calibration import Calibration
from hplm.tasks import find_task
from testing.random_store import change_version, random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS, Toy, random_text

TENANTS = [
    TenantFile("many", 1, "bio", 1, "multilabel", ["red", "grün", "blue", "black", "white"], 8),
    TenantFile("mark", 1, "root", 1, "regress", ["value"], 4),
    TenantFile("find", 1, "law", 1, "span", ["start", "end"], 8, "lora"),
    TenantFile("perhaps", 1, "bio", 1, "span", ["start", "end", "none"], 4),
    TenantFile("pair", 1, "bio", 1, "classify", ["no", "yes"], 8),
    TenantFile("word", 1, "bio", 1, "tag", ["O", "B-X", "I-X"], 2),
]


def make_tasks(
    folder: Path,
    calibrations: Mapping[str, Calibration] = MappingProxyType({}),
    name: str = CONFIG.name,
    more: Sequence[TenantFile] = (),
) -> Toy:
    """`calibrations`: of some tenants, by id. `name`: the backbone's. `more`: further tenants."""
    store = random_store(folder / f"{name}-store", replace(CONFIG, name=name), [*TENANTS, *more], DOMAINS, spread=0.3)
    leave_some_unanswered(store)
    for name, calibration in calibrations.items():
        change_version(store, store.tenant(name), calibration=calibration)
    return Toy(store, exported(store, folder / "repository"))


def leave_some_unanswered(store: Store) -> None:
    """Lets the tenant `perhaps` leave about half of the questions unanswered."""
    _, head = store.tenant_weights(TENANTS[3])
    often = head["bias"] + torch.tensor([0.0, 0.0, 4.0])
    change_version(store, TENANTS[3], head=(TENANTS[3].head_layout(store.config), {**head, "bias": often}))


def exported(store: Store, repository: Path) -> Path:
    export(store, repository, ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return repository


def question(rng: random.Random, task: str) -> tuple[str, str | None]:
    """Returns a text and, if the task needs one, its pair."""
    if find_task(task).needs_pair:
        return random_text(rng, 8), random_text(rng, rng.choice([45, 200]))  # the model takes 64 tokens
    return random_text(rng, 20), random_text(rng, 20) if task in ("classify", "regress") else None


def expected_logits(reference: Reference, tenant: TenantFile, text: str, pair: str | None) -> list[list[float]]:
    """Returns the reference's logits. For `span`, those of the best piece's ends, then that of no answer, if there is one."""
    if tenant.task != "span":
        return reference.forward(text, tenant.id, pair).tolist()
    windows = reference.windows(text, tenant.id, pair)
    best = max((window.best for window in windows), key=lambda piece: piece.sum)
    return [[*best.logits, *torch.stack([window.logits[0, 2:] for window in windows]).amin(0).tolist()]]


def same_labels(task: str, labels: list[str], expected: list[str]) -> bool:
    """Whether labels are the same. Numbers are compared with a tolerance."""
    if task == "regress":
        return abs(float(labels[0]) - float(expected[0])) <= 1e-3
    return labels == expected
