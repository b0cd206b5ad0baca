"""Makes what some benchmarks need: tasks of docstrings and of public texts, and a root for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.rows import say
from builder.learning.limits import Budget
from builder.store.store import Store
from builder.tables.root import RootOptions, build_root
from demo.building import minilm
from demo.data import MANIFEST, DemoData, data_of, stored, write_demo_data
from demo.domains import DOMAINS
from demo.public import stored_public_data
from demo.tasks import DemoTask
from hplm.engine.engine import resolve_device

WORDS = 64  # of a public text
Sizes = Mapping[str, int]  # texts of each file


def write_tasks(folder: Path, files: Sequence[Path], asked: Sequence[DemoTask], demo: Sizes, public: Sizes) -> None:
    """Writes tasks of docstrings, and of public texts if their files are given. What is there already stays."""
    domains = [domain for domain in DOMAINS if domain.name in {task.domain for task in asked}]
    written_as = {"sizes": dict(demo), "tasks": [task.tenant for task in asked]}
    stored(folder / "demo", written_as, lambda: write_demo_data(folder / "demo", domains, asked, demo))
    if files:
        stored_public_data(folder / "public", files, public, WORDS, {})


def tasks_in(folder: Path, with_public: bool = True) -> DemoData:
    """Returns the tasks that were written, those of docstrings first."""
    parts = [folder / part for part in ("demo", "public")[: 1 + with_public]]
    found = [data_of(part) for part in parts if (part / MANIFEST).exists()]
    domains, tenants = ([one for data in found for one in getattr(data, name)] for name in ("domains", "tenants"))
    return DemoData(tuple(domains), tuple(tenants))


def stored_root(folder: Path, model: str, corpora: list[Path], keep: float, minutes: float) -> Store:
    """Returns a store whose root has the lower two layers in its table. Builds it if it is missing."""
    if not (folder / "plot/root/1").exists():
        say(f"the root: adapting two layers, {minutes:g} minutes; then its table")
        options, budget = RootOptions(lower=2, keep=keep), Budget(minutes=minutes)
        build_root(model or str(minilm()), corpora, folder, options, budget, resolve_device("auto"))
    return Store(folder)
