"""Builds what the cascade benchmark measures: tenants with levels and ladders. It is kept, and built only once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.adaptation.learning import Budget
from builder.adaptation.short_stack import cut
from builder.cascade.build import build_levels
from builder.cascade.ladder import choose_ladders, profile_of
from builder.cascade.levels import OpenLevel, open_levels
from builder.cascade.profile import Profile
from builder.cascade.profiling import profile_tenant
from builder.cascade.selection import Target
from builder.cascade.sheet_times import SheetTimes
from builder.publish.precision import served_precision
from builder.store.levels import ladder_of
from builder.store.resumable import write_json
from builder.store.store import Store, TenantFile
from builder.tables.root import RootOptions, build_root
from builder.tables.stack import StackOptions, build_stack
from builder.training.tenant import build_tenant
from demo.building import fingerprint, minilm, named
from demo.data import DemoTenant, write_demo_data
from demo.domains import STDLIB
from demo.tasks import TASKS
from hplm.engine.engine import Precision, resolve_device
from hplm.levels.plan import Plan

QUESTIONS = ("stdlib-area", "stdlib-returns")  # about the docstrings of Python's own library, which every machine has
SHARES = {"calibrate": 0.25, "profile": 0.35, "test": 0.4}  # of the texts that no training has seen
PARTS = ("train", "dev", "calibrate", "profile", "test")
DEV = 200  # texts
EXIT = "exit"  # a stack of the first layers of the full one, and the twins of tenants that have a level on it


ALL = 100_000  # texts: as many as there are


@dataclass(frozen=True)
class CascadeBench:
    folder: Path = Path(".hplm/bench-cascade")  # what is built, which later runs use again
    model: str | None = None  # None: the demo's MiniLM
    lower: int = 2  # layers that become a table; the others are the full upper stack
    stacks: tuple[int, ...] = (1, 2, 3)  # layers of each
    seeds: int = 3  # tenants for each question
    drop: float = 0.5  # points that a plan may lose where it is selected
    minutes: float = 6.0  # of adapting the lower half
    stack_minutes: float = 4.0  # of each stack's learning
    train: int = 1500  # texts of each tenant
    calibrate: int = ALL
    profile: int = ALL
    test: int = ALL
    epochs: int = 3
    seconds: float = 20.0  # of each timed measurement
    rounds: int = 3
    dtype: str = "auto"
    timed: str = "served"


@dataclass(frozen=True)
class Question:
    """A classification with its texts, none of which is in two files."""

    name: str
    train: Path
    dev: Path  # chooses the epoch
    calibrate: Path
    profile: Path
    test: Path


@dataclass(frozen=True)
class Cascaded:
    """A tenant with its levels."""

    question: Question
    seed: int
    tenant: TenantFile
    levels: list[OpenLevel]  # the shallowest first, its own one last
    times: Sequence[SheetTimes]  # of these levels
    ladder: tuple[Plan, ...] = ()


@dataclass(frozen=True)
class Material:
    store: Store
    device: torch.device
    precision: Precision
    cascaded: list[Cascaded]
    exits: list[Cascaded]  # twins of these, whose only level is on the first layers of the full stack
    profiles: dict[str, Profile]  # by tenant; without the twins
    choices: list[dict[str, Any]]  # the sets of stacks from which one was chosen for all tenants


def material_of(case: CascadeBench) -> Material:
    """Builds what is missing in the folder of the case."""
    device, model = resolve_device("auto"), case.model or str(minilm())
    built = case.lower, case.stacks, case.minutes, case.stack_minutes, case.train, case.calibrate, case.profile, case.test
    folder = case.folder / fingerprint(named(model), *built, case.epochs)
    corpus, questions = written(folder / "data", case)
    store = _store(folder / "store", model, corpus, case, device)
    precision = _precision(folder / "precision.json", store, case.dtype, device)
    levelled = [
        _with_levels(store, question, seed, case, precision, device) for seed in range(case.seeds) for question in questions
    ]
    profiles = {one.tenant.id: profile_of(store, one.tenant, one.levels) for one in levelled}
    _, choices = choose_ladders(store, [one.tenant for one in levelled], profiles, Target(drop=case.drop))
    cascaded = [replace(one, ladder=ladder_of(store, one.tenant) or ()) for one in levelled]
    exits = [_with_exit(store, one, case, precision, device) for one in cascaded]
    return Material(store, device, precision, cascaded, exits, profiles, choices)


def written(folder: Path, case: CascadeBench) -> tuple[Path, list[Question]]:
    """Returns the corpus and the questions. Writes them if they are missing."""
    done = folder / "done.json"
    if not done.exists():
        asked = [task for task in TASKS if task.tenant in QUESTIONS]
        sizes = {"train": case.train, "dev": ALL, "test": ALL}
        for found in write_demo_data(folder, (STDLIB,), asked, sizes).tenants:
            _divide(found, case)
        write_json(done, {"questions": QUESTIONS})
    home = folder / STDLIB.name
    questions = [Question(name, *(home / f"{name}.{part}.jsonl" for part in PARTS)) for name in QUESTIONS]
    return home / "corpus.txt", questions


def _divide(found: DemoTenant, case: CascadeBench) -> None:
    """Divides the texts that no training has seen. All parts are from the same files, as later texts of a user would be."""
    dev, test = (path.read_text("utf-8").splitlines(keepends=True) for path in (found.dev, found.test))
    parts, left = {"dev": dev[:DEV]}, dev[DEV:] + test
    left = [left[number] for number in np.random.default_rng(0).permutation(len(left))]
    ends = np.cumsum([round(share * len(left)) for share in SHARES.values()]).tolist()
    for part, start, end in zip(SHARES, [0, *ends], ends, strict=False):
        parts[part] = left[start:end][: getattr(case, part)]
    for part, lines in parts.items():
        found.dev.with_name(f"{found.id}.{part}.jsonl").write_text("".join(lines), "utf-8")


def _store(folder: Path, model: str, corpus: Path, case: CascadeBench, device: torch.device) -> Store:
    """Returns a store with a root and stacks."""
    if not (folder / "plot/root/1").exists():
        say(f"the root: adapting {case.lower} layers, {case.minutes:g} minutes")
        options = RootOptions(name="minilm", lower=case.lower)
        build_root(model, [corpus], folder, options, Budget(minutes=case.minutes), device)
    store = Store(folder)
    for layers in case.stacks:
        name = f"layers-{layers}"
        if name not in store.stacks():
            say(f"a stack of {layers} layers, {case.stack_minutes:g} minutes")
            build_stack(store, name, [corpus], StackOptions(layers), Budget(minutes=case.stack_minutes), device)
    if EXIT not in store.stacks():
        layers = list(range(min(case.stacks)))
        store.save_stack(EXIT, cut(store.upper(), layers), {"layers": len(layers), "started_from": layers}, None)
    return store


def _precision(stored: Path, store: Store, dtype: str, device: torch.device) -> Precision:
    """Returns the precision that serves. It is measured once, because everything is calibrated for it."""
    known = json.loads(stored.read_text("utf-8")) if stored.exists() else {}
    if dtype not in known:
        known[dtype] = served_precision(store, dtype, device).name
        write_json(stored, known)
    return served_precision(store, known[dtype], device)


def _with_levels(
    store: Store, question: Question, seed: int, case: CascadeBench, precision: Precision, device: torch.device
) -> Cascaded:
    id = f"{question.name}-{seed}"
    if not store.tenant_folder(id, 1).exists():
        say(f"tenant {id}")
        build_tenant(store, id, "root", "classify", question.train, question.dev, device=device, epochs=case.epochs, seed=seed)
    say(f"levels of {id}")
    stacks = [f"layers-{layers}" for layers in case.stacks]
    tenant = build_levels(store, id, stacks, question.calibrate, precision, device, epochs=case.epochs, seed=seed).tenant
    levels = open_levels(store, tenant)
    timed = case.timed != "nothing"  # plans follow from times, and what is kept may be from a busy machine
    profile, _ = profile_tenant(store, tenant, levels, question.profile, precision, device, [question.calibrate], again=timed)
    return Cascaded(question, seed, tenant, levels, profile.times)


def _with_exit(store: Store, one: Cascaded, case: CascadeBench, precision: Precision, device: torch.device) -> Cascaded:
    """Returns a copy of the tenant with an early exit. It is another tenant, because plans number all levels of one."""
    twin = replace(one.tenant, id=f"{one.tenant.id}-{EXIT}")
    if not store.tenant_folder(twin.id, twin.version).exists():
        store.save_tenant(twin, *store.tenant_weights(one.tenant), store.report(one.tenant), lambda path: None)
    say(f"the early exit of {one.tenant.id}")
    build_levels(store, twin.id, [EXIT], one.question.calibrate, precision, device, epochs=case.epochs, seed=one.seed)
    alike = [one.times[0], one.times[-1]]  # of as many layers
    return Cascaded(one.question, one.seed, twin, open_levels(store, twin), alike)


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)
