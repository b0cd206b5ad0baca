"""Data of two toy tasks in one domain, as a study of the demo's tasks finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from demo.data import DemoData, DemoDomain, DemoTenant
from tests.builder.stores import corpus
from tests.builder.training.small_tenants import made

LABELS = {"toy-classify": ("left", "right"), "toy-tag": ("B-P", "I-P", "O")}


def toy_data(folder: Path, sizes: Mapping[str, int], documents: int = 300) -> DemoData:
    """`sizes`: of train, dev and test."""
    tenants = []
    for name, labels in LABELS.items():
        task = name.removeprefix("toy-")
        files = {part: made(folder, task, size, part) for part, size in sizes.items()}
        tenants.append(DemoTenant(name, "toys", task, "?", labels, **files, majority_share=0.5))
    return DemoData((DemoDomain("toys", corpus(folder, 1, documents), documents),), tuple(tenants))
