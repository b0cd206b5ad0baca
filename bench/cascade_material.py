"""What `hplm bench cascade` measures: questions, a store with a tenant for each, their exits, and what these answer offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.rows import say
from builder.evaluation.tenant import find_tenant, opened
from builder.exits.answers import answered_by, calibration_by
from builder.exits.build import build_exits
from builder.exits.heads import outputs_of
from builder.exits.states import States, states_of
from builder.exits.thresholds import Answered, Estimate
from builder.learning.limits import Budget
from builder.store.store import Store, TenantFile
from builder.tables.root import RootOptions, build_root
from builder.tasks.examples import Labelled
from builder.tasks.tasks import TrainingTask, training_task
from builder.training.tenant import build_tenant
from demo.building import minilm
from demo.data import MANIFEST, DemoTenant, data_of, write_demo_data
from demo.data import stored as written
from demo.domains import DOMAINS
from demo.tasks import TASKS
from hplm.arrays import Array
from hplm.engine.engine import Precision, resolve_device
from hplm.errors import InvalidInput
from hplm.levels.calibration import Calibration
from hplm.tasks import softmax
from hplm.tenants.exits import Exits, Plan
from hplm.tenants.knowledge import ExitKnowledge

SIZES = {"train": 2000, "dev": 600, "test": 1500}  # texts of each file
TRAINING = {"adapter": "lora", "rank": 16, "learning_rate": 2e-3, "body_rate": 3e-5}


def stored(
    folder: Path, model: str, count: int, texts: int, epochs: int, minutes: float, keep: float
) -> tuple[Store, dict[str, DemoTenant]]:
    """Builds what the folder lacks. Returns the questions by tenant. `texts`: of each file, at most."""
    data, home, device = folder / "demo", folder / "store", resolve_device("auto")
    if not (data / MANIFEST).exists():
        asked = [task for task in TASKS if task.task == "classify"][:count]
        domains = [domain for domain in DOMAINS if domain.name in {task.domain for task in asked}]
        sizes = {part: min(size, texts) for part, size in SIZES.items()}
        written(data, {"sizes": sizes, "tasks": count}, lambda: write_demo_data(data, domains, asked, sizes))
    questions = questions_in(folder, count)
    if not (home / "plot/root/1").exists():
        say(f"the root: adapting two layers, {minutes:g} minutes; then its table")
        corpora = sorted({own.train.with_name("corpus.txt") for own in questions.values()})
        build_root(model or str(minilm()), corpora, home, RootOptions(lower=2, keep=keep), Budget(minutes=minutes), device)
    store = Store(home)
    for id, own in questions.items():
        if not store.tenant_folder(id, 1).exists():
            say(f"tenant {id}")
            build_tenant(store, id, "root", own.task, own.train, own.dev, device=device, epochs=epochs, **TRAINING)
    return store, questions


def questions_in(folder: Path, count: int) -> dict[str, DemoTenant]:
    data = folder / "demo"
    every = [one for one in data_of(data).tenants if one.task == "classify"] if (data / MANIFEST).exists() else []
    if not every:
        raise InvalidInput(f"{folder} has no questions: `hplm bench cascade --folder {folder}` builds some")
    return {one.id: one for one in every[:count]}


class Way(NamedTuple):
    """What leaving does to test texts."""

    work: float  # the share of the layers' work that is left
    lost: Estimate


def described(ways: Sequence[Way]) -> dict[str, float]:
    """Returns means over tenants, and how far off the points may be."""
    off = float(np.sqrt(np.sum([way.lost.off**2 for way in ways]))) / len(ways)
    work, lost = np.mean([(way.work, way.lost.points) for way in ways], axis=0).tolist()
    return {"work": work, "points_lost": lost, "points_lost_off": off}


@dataclass(frozen=True)
class Part:
    """Holds what the exits, and last the full stack, answer to some texts."""

    answered: Answered
    probabilities: Array  # exits + 1 x texts x labels, calibrated
    labels: Array  # exits + 1 x texts: numbers of labels
    wanted_numbers: Array  # of the right labels

    @property
    def right(self) -> Array:
        return (self.labels == self.wanted_numbers).astype(float)


@dataclass(frozen=True)
class Judged:
    """A tenant's exits, and what they answer."""

    id: str
    exits: Exits
    choosing: Part
    test: Part
    names: Sequence[str]  # of the labels
    texts: list[str]  # of the test
    tokens: float  # of a text

    def expected(self) -> tuple[Array, Array]:
        """Returns of each test text the right label (empty: the tenant does not know it), and those of the exits."""
        names = np.array([*self.names, ""])
        return names[self.test.wanted_numbers], names[self.test.labels].T

    def plan(self, rung: int) -> Plan:
        """Returns a plan, the dearest first; the cheapest, if there are fewer."""
        return self.exits.plans[min(rung, len(self.exits.plans) - 1)]

    def way(self, leaving: Plan) -> Way:
        answered, right = self.test.answered, self.test.right
        left, texts = answered.left_at(leaving), np.arange(len(self.texts))
        return Way(answered.cost_of(leaving), Estimate.of(right[-1] - right[left, texts]))

    def random(self, leaving: Plan) -> Way:
        """Returns what is expected if as many texts leave, whichever they are."""
        left, right = self.test.answered.left_at(leaving), self.test.right.mean(axis=1)
        lost = 100 * float(right[-1] - right[left].mean())
        return Way(self.test.answered.cost_of(leaving), Estimate(lost, 0.0))


def judged(store: Store, id: str, question: DemoTenant, precision: Precision) -> Judged:
    """Makes a tenant's exits if they are missing in this precision. The texts that judge them have chosen nothing."""
    tenant, task, device = find_tenant(store, id), training_task(question.task), resolve_device("auto")
    say(f"exits of {id} in {precision.name}, and their answers")
    found, _ = build_exits(store, id, question.dev, precision, device, seen=[question.train], show_progress=False)
    weights = store.tenant_weights(tenant)
    given = [task.read(question.dev), task.read(question.test)]
    states = [states_of(*opened(store, tenant, weights, part, device, precision, False)) for part in given]
    full = calibration_by(given[0].examples, tenant.labels, states[0].logits)
    choosing, test = (_part(store, tenant, task, found.exits, full, *own) for own in zip(given, states, strict=True))
    texts = [example.text for example in given[1].examples]
    return Judged(id, found.exits.exits, choosing, test, tenant.labels, texts, float(states[1].lengths.mean()))


def _part(
    store: Store,
    tenant: TenantFile,
    task: TrainingTask,
    found: ExitKnowledge,
    full: Calibration,
    labelled: Labelled,
    seen: States,
) -> Part:
    """Returns what the exits and the full stack answer to these texts."""
    outputs = [outputs_of(*one) for one in zip(map(dict, found.heads), repeat(found.layout), seen.exits)]
    calibrations = found.exits.calibrations
    answered, _ = answered_by(tenant, task, seen, outputs, calibrations, full, store.config)
    logits = [(own, one.temperature) for own, one in zip(outputs, calibrations, strict=True)]
    logits.append((seen.logits, full.temperature))
    number_of = {label: number for number, label in enumerate(tenant.labels)}
    return Part(
        answered,
        np.array([softmax(own.numpy() / temperature) for own, temperature in logits]),
        np.array([own.numpy().argmax(axis=1) for own, _ in logits]),
        np.array([number_of.get(example.labels[0], -1) for example in labelled.examples]),
    )
