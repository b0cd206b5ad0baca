"""What `hplm bench cascade` measures: questions, a store with a tenant for each, their exits, and what these answer offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.rows import say
from builder.adaptation.learning import Budget
from builder.evaluation.tenant import find_tenant, opened
from builder.exits.answers import answered_by, calibration_by
from builder.exits.build import build_exits
from builder.exits.heads import outputs_of
from builder.exits.states import states_of
from builder.exits.thresholds import Answered, Estimate
from builder.store.exits import layout_of
from builder.store.resumable import write_json
from builder.store.store import Store
from builder.tables.root import RootOptions, build_root
from builder.training.tasks import training_task
from builder.training.tenant import build_tenant
from demo.building import minilm
from demo.data import write_demo_data
from demo.domains import DOMAINS
from demo.public import stored_public_data
from demo.tasks import TASKS
from hplm.arrays import Array
from hplm.engine.engine import Precision, resolve_device
from hplm.tenants.exits import NEVER, Exits

DEMO, PUBLIC = {"train": 2000, "dev": 600, "test": 1500}, {"train": 3000, "dev": 600, "test": 3000}
WORDS = 64  # of a public text
TRIED = 40  # thresholds of a single exit
TRAINING = {"adapter": "lora", "rank": 16, "learning_rate": 2e-3, "body_rate": 3e-5}


class Question(NamedTuple):
    task: str
    train: Path
    dev: Path
    test: Path


def stored(
    folder: Path, model: str, files: Sequence[Path], count: int, texts: int, epochs: int, minutes: float, keep: float | None
) -> tuple[Store, dict[str, Question]]:
    """Builds what the folder lacks. Returns the questions by tenant. `texts`: of each file, at most."""
    known = folder / "tasks.json"
    if not known.exists():
        demo, public = ({part: min(size, texts) for part, size in sizes.items()} for sizes in (DEMO, PUBLIC))
        asked = [task for task in TASKS if task.task == "classify"][:count]
        domains = [domain for domain in DOMAINS if domain.name in {task.domain for task in asked}]
        found = [*write_demo_data(folder / "demo", domains, asked, demo).tenants]
        found += stored_public_data(folder / "public", files, public, WORDS, {}).data.tenants if files else ()
        write_json(known, {one.id: [one.task, *map(str, (one.train, one.dev, one.test))] for one in found[:count]})
    listed = json.loads(known.read_text("utf-8"))
    every = {id: Question(task, *map(Path, own)) for id, (task, *own) in listed.items() if task == "classify"}
    questions, device = dict(list(every.items())[:count]), resolve_device("auto")
    if not (folder / "store/plot/root/1").exists():
        say(f"the root: adapting two layers, {minutes:g} minutes; then its table")
        corpora = sorted({own.train.with_name("corpus.txt") for own in every.values()})
        options = RootOptions(lower=2, keep=keep)
        build_root(model or str(minilm()), corpora, folder / "store", options, Budget(minutes=minutes), device)
    store = Store(folder / "store")
    for id, own in questions.items():
        if not store.tenant_folder(id, 1).exists():
            say(f"tenant {id}")
            build_tenant(store, id, "root", own.task, own.train, own.dev, device=device, epochs=epochs, **TRAINING)
    return store, questions


class Way(NamedTuple):
    """What leaving does to test texts."""

    work: float  # the share of the layers' work that is left
    lost: Estimate
    agrees: float = 1.0  # the share with the full stack's answer


@dataclass(frozen=True)
class Judged:
    """A tenant's exits, and what they answer."""

    id: str
    exits: Exits
    choosing: Answered
    test: Answered
    texts: list[str]  # of the test
    wanted: list[str]
    labels: Array  # exits + 1 x texts: the answers, the full stack's last
    tokens: float  # of a text

    @property
    def right(self) -> Array:
        return (self.labels == np.array(self.wanted)).astype(float)

    def plan(self, rung: int) -> Sequence[float]:
        """Returns the thresholds of a plan, the dearest first; of the cheapest, if there are fewer."""
        return self.exits.plans[min(rung, len(self.exits.plans) - 1)].thresholds

    def way(self, thresholds: Sequence[float]) -> Way:
        left, texts = self.test.left_at(thresholds), np.arange(len(self.texts))
        lost = Estimate.of(self.right[-1] - self.right[left, texts])
        return Way(self.test.cost_of(thresholds, left), lost, float(self.test.agrees[left, texts].mean()))

    def random(self, thresholds: Sequence[float]) -> Way:
        """Returns what is expected if as many texts leave at each exit, whichever they are."""
        left, right = self.test.left_at(thresholds), self.right.mean(axis=1)
        lost = 100 * float(right[-1] - right[left].mean())
        return Way(self.test.cost_of(thresholds, left), Estimate(lost, 0.0))

    def single(self, most: float) -> Way:
        """Returns what the one exit and threshold do that spare most within a loss of `most` points."""
        closed, best = [NEVER] * len(self.choosing.confidences), (1.0, [NEVER] * len(self.choosing.confidences))
        for number, own in enumerate(self.choosing.confidences):
            for threshold in np.unique(np.quantile(own, np.linspace(0, 1, TRIED))).tolist():
                tried = [*closed[:number], threshold, *closed[number + 1 :]]
                left = self.choosing.left_at(tried)
                if 100 * self.choosing.losses_of(left).mean() <= most:
                    best = min(best, (self.choosing.cost_of(tried, left), tried))
        return self.way(best[1])


def judged(store: Store, id: str, question: Question, precision: Precision) -> Judged:
    """Makes a tenant's exits if they are missing in this precision. The texts that judge them have chosen nothing."""
    tenant, task, device = find_tenant(store, id), training_task(question.task), resolve_device("auto")
    say(f"exits of {id} in {precision.name}, and their answers")
    found, _ = build_exits(store, id, question.dev, precision, device, seen=[question.train], show_progress=False)
    weights, layout = store.tenant_weights(tenant), layout_of(store, tenant)
    parts = [task.read(question.dev), task.read(question.test)]
    states = [states_of(*opened(store, tenant, weights, part, device, precision, False)) for part in parts]
    full = calibration_by(parts[0].examples, tenant.labels, states[0].logits)
    (choosing, _), (test, answers) = (
        answered_by(
            tenant, task, own, [outputs_of(head, layout, exit) for head, exit in zip(found.heads, own.exits, strict=True)],
            found.exits.calibrations, full, store.config,
        )
        for own in states
    )  # fmt: skip
    labels = np.array([[answer.labels[0] for answer in of_exit] for of_exit in answers])
    texts, wanted = zip(*((one.text, one.labels[0]) for one in parts[1].examples), strict=True)
    return Judged(id, found.exits, choosing, test, list(texts), list(wanted), labels, float(states[1].lengths.mean()))
