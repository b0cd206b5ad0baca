"""Tenants of tasks that the toy does not have: several labels, a number, a piece of a passage."""

from __future__ import annotations

import random
from pathlib import Path

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.tasks import find_task
from testing.random_store import random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS, Toy, random_text

TENANTS = [
    TenantFile("many", 1, "bio", 1, "multilabel", ["red", "grün", "blue", "black", "white"], 8),
    TenantFile("mark", 1, "root", 1, "regress", ["value"], 4),
    TenantFile("find", 1, "law", 1, "span", ["start", "end"], 8, "lora"),
    TenantFile("pair", 1, "bio", 1, "classify", ["no", "yes"], 8),
    TenantFile("word", 1, "bio", 1, "tag", ["O", "B-X", "I-X"], 2),
]


def make_tasks(folder: Path) -> Toy:
    store = random_store(folder / "store", CONFIG, TENANTS, DOMAINS, spread=0.3)
    export(store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256))
    return Toy(store, folder / "repository")


def question(rng: random.Random, task: str) -> tuple[str, str | None]:
    """Returns a text and, if the task needs one, its pair."""
    if find_task(task).needs_pair:
        return random_text(rng, 8), random_text(rng, 45)
    return random_text(rng, 20), random_text(rng, 20) if task in ("classify", "regress") else None


def expected_logits(reference: Reference, tenant: TenantFile, text: str, pair: str | None, spans) -> list[list[float]]:
    """Returns the reference's logits. For `span`, those of the tokens at which the given answer starts and ends."""
    logits = reference.forward(text, tenant.id, pair).numpy()
    if tenant.task != "span":
        return logits.tolist()
    encoded = reference.backbone.tokenizer().encode(text, pair)
    offsets = [
        tuple(map(int, encoded.offsets[i]))
        for i in range(len(encoded.tokens))
        if encoded.segments[i] == 1 and not encoded.special[i]
    ]
    (start, stop), starts, stops = spans[0], [begin for begin, _ in offsets], [end for _, end in offsets]
    return [[float(logits[starts.index(start), 0]), float(logits[stops.index(stop), 1])]]


def same_labels(task: str, labels: list[str], expected: list[str]) -> bool:
    """Whether labels are the same. Numbers are compared with a tolerance."""
    if task == "regress":
        return abs(float(labels[0]) - float(expected[0])) <= 1e-3
    return labels == expected
