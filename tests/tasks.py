"""Tenants of tasks that the toy does not have, and what the reference says of their answers: logits and confidences."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store, TenantVersion
from hplm.calibration import Calibration
from hplm.tasks.tasks import find_task
from hplm.tenants.embedding import Embedding
from testing.random_store import change_version, random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS, Toy, random_text

PREFIXES = {"query": "a b ", "passage": "c "}
TENANTS = [
    TenantVersion("many", 1, "bio", 1, "multilabel", ["red", "grün", "blue", "black", "white"], 8),
    TenantVersion("mark", 1, "root", 1, "regress", ["value"], 4),
    TenantVersion("find", 1, "law", 1, "span", ["start", "end"], 8, "lora"),
    TenantVersion("perhaps", 1, "bio", 1, "span", ["start", "end", "none"], 4),
    TenantVersion("pair", 1, "bio", 1, "classify", ["no", "yes"], 8),
    TenantVersion("word", 1, "bio", 1, "tag", ["O", "B-X", "I-X"], 2),
    TenantVersion("near", 1, "bio", 1, "embed", [], 8, "lora", embedding=Embedding(32, prefixes=PREFIXES)),
    TenantVersion("first", 1, "root", 1, "embed", [], 0, embedding=Embedding(20, "first", normalised=False)),
    TenantVersion("short", 1, "law", 1, "embed", [], 4, embedding=Embedding(24, shortens=True, limit=12)),
]
SPAN, WORD, PAIR, STUDENTS = 6.0, 2.5, 0.6, 1.5  # temperatures
CALIBRATIONS = {  # `find` has none, and numbers cannot have one
    "many": Calibration(temperature=1.7),
    "perhaps": Calibration(temperature=SPAN),
    "pair": Calibration(temperature=PAIR),
    "word": Calibration(temperature=WORD),
}


def make_tasks(folder: Path, name: str = CONFIG.name, more: Sequence[TenantVersion] = (), calibrated: bool = False) -> Toy:
    """`name`: the backbone's. `more`: further tenants. `calibrated`: the tenants of tasks have their calibrations."""
    store = random_store(folder / f"{name}-store", replace(CONFIG, name=name), [*TENANTS, *more], DOMAINS, spread=0.3)
    leave_some_unanswered(store)
    if calibrated:
        calibrate(store)
    return Toy(store, exported(store, folder / "repository"))


def calibrate(store: Store) -> None:
    for name, calibration in CALIBRATIONS.items():
        change_version(store, store.tenant(name), calibration=calibration)


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


def expected_logits(reference: Reference, tenant: TenantVersion, text: str, pair: str | None) -> list[list[float]]:
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


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def of_logits(tenant_id, labels, logits):
    """Returns the confidence in an answer by its labels and the rows of its logits; None if these do not tell it."""
    logits = np.asarray(logits, dtype=np.float64)
    if tenant_id == "pair":
        return softmax(logits[0] / PAIR).max()
    if tenant_id == "many":
        return 1 / (1 + np.exp(-np.abs(logits[0]).min() / 1.7))
    if tenant_id == "word":
        rows = logits[[number for number, label in enumerate(labels) if label]]
        least = rows[softmax(rows).max(1).argmin()] if len(rows) else None
        return -1 if least is None else softmax(least / WORD).max()
    return None


def expected_confidence(reference, tenant_id, labels, logits, text, pair):
    """Returns the confidence in an answer of any tenant; -1 for one without a calibration."""
    if tenant_id == "iris":
        return softmax(np.asarray(logits, dtype=np.float64)[0] / STUDENTS).max()
    sure = of_logits(tenant_id, labels, logits) if tenant_id in CALIBRATIONS else -1.0
    return of_passage(reference.windows(text, tenant_id, pair)) if sure is None else sure


def of_passage(windows):
    """Returns the confidence of `perhaps` in the best piece of a passage, or in none, from what the reference says of it."""
    best = max((window.best for window in windows), key=lambda piece: piece.sum)
    none = min(float(window.logits[0, 2]) for window in windows)
    starts, stops = (np.array([float(row[end]) for window in windows for row in window.logits[1:]]) for end in (0, 1))
    chosen = best.logits if best.sum >= none else (none / 2, none / 2)
    ends = zip(chosen, (starts, stops), strict=True)
    return np.prod([np.exp(own / SPAN) / (np.exp(all / SPAN).sum() + np.exp(none / 2 / SPAN)) for own, all in ends])
