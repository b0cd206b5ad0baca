"""Exits that learn or are calibrated in other ways, fewer layers, other seeds, and pairs, on tenants of `hplm bench cascade`.

All is computed offline. Plans are chosen by the dev texts, as `hplm tenant exits` chooses them, and judged by the labels of the
test texts. Work is the share of the layers' work that is left.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bench.cascade_material import TRAINING, Question, part_of, questions_in
from bench.rows import say
from builder.evaluation.tenant import ServedBody, find_tenant, opened
from builder.exits.answers import calibration_by, calibrations_for, costs_of
from builder.exits.build import DROPS
from builder.exits.heads import learned, outputs_of
from builder.exits.states import MOST_ROWS, States, states_of
from builder.exits.thresholds import Estimate, within
from builder.packed_batches import packed_batches
from builder.publish.precision import served_precision
from builder.store.exits import layout_of
from builder.store.resumable import read_json, write_json
from builder.store.stacks import UPPER
from builder.store.store import Store, TenantFile
from builder.training.finetuning import PACK_TOKENS, Ground
from builder.training.labelled import Labelled
from builder.training.tasks import TrainingTask, training_task
from builder.training.tenant import build_tenant
from hplm.arrays import Array
from hplm.engine.engine import Precision, resolve_device
from hplm.errors import InvalidInput
from hplm.levels.calibration import Calibration
from hplm.model.layer import unchanged
from hplm.model.weights import load_weights, save_weights
from research.papers.tabi import Point, Ways, mean_of

PAIRS, SAME = "pairs", ("same", "different")
SURE = 20.0  # the logit of a label alone
WIDTH, BATCH = 256, 256  # of a shared transform, of its training

Guesses = Sequence[nn.Module]  # of each exit: what the last states would be


@dataclass(frozen=True)
class Seen:
    """Holds what exits see of a tenant's texts: heads learn from the first set, the second chooses plans, the third judges."""

    store: Store
    tenant: TenantFile
    task: TrainingTask
    given: Sequence[Labelled]
    states: Sequence[States]
    last: Tensor  # states of the learning texts behind all layers, without the tenant's adapter
    full: Calibration

    @classmethod
    def of(cls, store: Store, id: str, question: Question, precision: Precision) -> Seen:
        say(f"{store.folder.name}: what exits of {id} see")
        tenant, task, device = find_tenant(store, id), training_task(question.task), resolve_device("auto")
        given = [task.read(file) for file in (question.train, question.dev, question.test)]
        weights = store.tenant_weights(tenant)
        opening = [opened(store, tenant, weights, own, device, precision, False) for own in given]
        states = [states_of(*own, most) for own, most in zip(opening, (MOST_ROWS, None, None), strict=True)]
        full = calibration_by(given[1].examples, tenant.labels, states[1].logits)
        return cls(store, tenant, task, given, states, _last(opening[0][0], opening[0][2]), full)

    def heads(self, states: Sequence[States]) -> list[list[Tensor]]:
        """Returns what heads that learn from the first states say of the choosing and of the judging texts."""
        layout = layout_of(self.store, self.tenant)
        heads = learned(states[0], layout, self.task)
        return [[outputs_of(*one).clone() for one in zip(heads, repeat(layout), own.exits)] for own in states[1:]]

    def points(self, outputs: Sequence[Sequence[Tensor]]) -> list[Point]:
        """Returns what each plan spares and loses, if exits say this of the choosing and of the judging texts."""
        own = calibrations_for(self.task, outputs[0], self.states[1].logits, self.full, 0.0)
        choosing, judged = (
            part_of(self.store, self.tenant, self.task, labelled, states, said, own, self.full)
            for labelled, states, said in zip(self.given[1:], self.states[1:], outputs, strict=True)
        )
        found, texts = [], np.arange(len(judged.wanted_numbers))
        for leaving in within(choosing.answered, DROPS):
            left = judged.answered.left_at(leaving)
            lost = Estimate.of(judged.right[-1] - judged.right[left, texts])
            found.append(Point(judged.answered.cost_of(leaving), lost))
        return found


@torch.inference_mode()
def _last(body: ServedBody, ground: Ground) -> Tensor:
    found = torch.empty(len(ground.texts.texts), ground.config.hidden)
    for some in packed_batches(ground.texts.lengths, PACK_TOKENS, len(found)):
        pack = ground.reader.pack(ground.texts, some, ground.device)
        assert pack.sums is not None  # as the body reads tables
        x = body.upper.enter(body.entering(pack.sums), pack.positions, pack.segments)
        attend = body.attention(pack, ground.device)
        for layer in body.upper_layers:
            x = layer(x, attend, unchanged)
        found[torch.from_numpy(some)] = x[pack.reading].float().cpu()
    return found


def served(seen: Seen, guesses: Guesses) -> list[Point]:
    return seen.points(seen.heads(seen.states))


def by_labels(seen: Seen, guesses: Guesses) -> list[Point]:
    """Heads learn from the labels, and not from the full stack's answers."""
    learning = seen.states[0]
    wanted = [seen.tenant.labels.index(example.labels[0]) for example in seen.given[0].examples[: len(learning.rows_of)]]
    sure = SURE * nn.functional.one_hot(torch.tensor(wanted), learning.logits.shape[1]).float()
    return seen.points(seen.heads([replace(learning, logits=sure), *seen.states[1:]]))


def by_class(seen: Seen, guesses: Guesses) -> list[Point]:
    """Each class has a scale and a shift, in place of one temperature for all. The choosing texts fit them."""
    wanted = torch.softmax(seen.states[1].logits / seen.full.temperature, dim=1)
    scaled: tuple[list[Tensor], list[Tensor]] = [], []
    for own in zip(*seen.heads(seen.states), strict=True):
        scale, shift = (nn.Parameter(start) for start in (torch.ones(own[0].shape[1]), torch.zeros(own[0].shape[1])))
        fit([scale, shift], lambda own=own, scale=scale, shift=shift: cross_entropy(own[0] * scale + shift, wanted))
        for kept, logits in zip(scaled, own, strict=True):
            kept.append((logits * scale + shift).detach())
    return seen.points(scaled)


def transformed(seen: Seen, guesses: Guesses) -> list[Point]:
    """Heads read what a transform, which all tenants share, takes for the token's last state, in place of its state there."""
    return seen.points(
        seen.heads(
            [
                replace(own, exits=[guessed(guess, exit) for guess, exit in zip(guesses, own.exits, strict=True)])
                for own in seen.states
            ]
        )
    )


SERVED = "as served"
WAYS: dict[str, Callable[[Seen, Guesses], list[Point]]] = {
    SERVED: served,
    "heads learn from labels": by_labels,
    "calibrated by class": by_class,
    "a shared transform": transformed,
}


def guesses_of(tenants: Sequence[Seen]) -> Guesses:
    """Learns, once for a backbone, to guess the last states from what each exit sees."""
    torch.manual_seed(0)
    last = torch.cat([seen.last for seen in tenants])
    found: list[nn.Module] = []
    for exit in range(len(tenants[0].states[0].exits)):
        rows = torch.cat([seen.states[0].exits[exit] for seen in tenants]).float()
        guess = nn.Sequential(
            nn.LayerNorm(rows.shape[1]), nn.Linear(rows.shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, last.shape[1])
        )

        def distance(guess: nn.Module = guess, rows: Tensor = rows) -> Tensor:
            some = torch.randint(len(rows), (BATCH,))
            return mse_loss(guess(rows[some]), last[some])

        fit(list(guess.parameters()), distance, rate=1e-3, steps=3000)
        found.append(guess)
    return found


@torch.no_grad()
def guessed(guess: nn.Module, rows: Tensor) -> Tensor:
    last = guess(rows.float())
    return torch.cat([last, rows[:, last.shape[1] :]], dim=1).half()


def fit(weights: list[Tensor], distance: Callable[[], Tensor], rate: float = 0.05, steps: int = 300) -> None:
    optimizer = torch.optim.Adam(weights, rate)
    for _ in range(steps):
        optimizer.zero_grad()
        distance().backward()
        optimizer.step()


def variant(
    folder: Path, name: str, questions: dict[str, Question], epochs: int, seed: int = 0, layers: int | None = None
) -> Store:
    """Returns a store like the benchmark's. Its tenants learn with another seed, other questions, or fewer upper layers."""
    base, own = folder / "store", folder / name
    if not (own / "store.json").exists():
        own.mkdir(exist_ok=True)
        config, upper = read_json(base / "backbone.json"), load_weights(base / UPPER)
        kept = config["upper_layers"] = layers or config["upper_layers"]
        write_json(own / "backbone.json", config)
        layer_of = {weight: int(weight.split(".")[1]) for weight in upper if weight.startswith("layers.")}
        save_weights({weight: one for weight, one in upper.items() if layer_of.get(weight, 0) < kept}, own / UPPER)
        for part in ("plot", "counts", "lower", "tokenizer.json"):
            (own / part).symlink_to((base / part).resolve())
        shutil.copy(base / "store.json", own)
    store = Store(own)
    for id, question in questions.items():
        if not store.tenant_folder(id, 1).exists():
            say(f"{name}: tenant {id}")
            build_tenant(
                store, id, "root", question.task, question.train, question.dev, show_progress=False, seed=seed, **TRAINING
            )
    return store


def pairs_of(question: Question, folder: Path) -> Question:
    """Asks of two texts whether they have the same label. Each text is the first of one pair."""
    folder.mkdir(exist_ok=True)
    files = []
    for part in ("train", "dev", "test"):
        examples = training_task(question.task).read(getattr(question, part)).examples
        of_label: dict[str, list[str]] = {}
        for example in examples:
            of_label.setdefault(example.labels[0], []).append(example.text)
        random, lines = np.random.default_rng(len(files)), []
        labels = list(of_label)
        for example in examples:
            label = example.labels[0]
            if random.integers(2):
                label = labels[(labels.index(label) + int(random.integers(1, len(labels)))) % len(labels)]
            lines.append(
                {
                    "text": example.text,
                    "text_pair": str(random.choice(of_label[label])),
                    "label": SAME[label != example.labels[0]],
                }
            )
        files.append(folder / f"{part}.jsonl")
        files[-1].write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return Question(question.task, *files)


def _right(store: Store, id: str, question: Question, precision: Precision) -> tuple[Array, float]:
    """Returns which test texts are answered rightly, and the work of a text in passes through a layer."""
    tenant, task = find_tenant(store, id), training_task(question.task)
    labelled = task.read(question.test)
    weights = store.tenant_weights(tenant)
    states = states_of(*opened(store, tenant, weights, labelled, resolve_device("auto"), precision, False))
    wanted = np.array([example.labels[0] for example in labelled.examples])
    right = np.array(tenant.labels)[states.logits.numpy().argmax(axis=1)] == wanted
    return right.astype(float), 1 / float(costs_of(store.config, len(wanted) / states.lengths.sum())[1])


def figures(folder: Path, dtype: str, tenants: Sequence[str], seeds: int, fewer: Sequence[int], epochs: int) -> Ways:
    """Returns means over tenants and seeds, by way and drop (or upper layers)."""
    asked = {id: question for id, question in questions_in(folder, 100).items() if not tenants or id in tenants}
    if not asked:
        raise InvalidInput(f"none of the tenants {', '.join(tenants)} is among the questions of {folder}")
    store = Store(folder / "store")
    if any(not 0 < layers < store.config.upper_layers for layers in fewer):
        raise InvalidInput(f"--layers {', '.join(map(str, fewer))}: give numbers from 1 to {store.config.upper_layers - 1}")
    precision = served_precision(store, dtype, resolve_device("auto"))
    found: dict[str, dict[str, list[Point]]] = {}

    def keep(way: str, at: Sequence[str], points: Sequence[Point]) -> None:
        for name, point in zip(at, points, strict=True):
            found.setdefault(way, {}).setdefault(name, []).append(point)

    drops = [f"{drop:g}" for drop in DROPS]
    for seed in range(seeds):
        own = variant(folder, f"seed-{seed}", asked, epochs, seed) if seed else store
        every = [Seen.of(own, id, question, precision) for id, question in asked.items()]
        guesses = guesses_of(every)
        for seen in every:
            for way, points_of in WAYS.items():
                points = points_of(seen, guesses)
                keep(way, drops, points)
                if way == SERVED:
                    keep(f"{way}, seed {seed}", drops, points)
    for layers in fewer:
        own = variant(folder, f"layers-{layers}", asked, epochs, layers=layers)
        for id, question in asked.items():
            (whole, work), (part, less) = (_right(one, id, question, precision) for one in (store, own))
            keep("fewer layers", [f"{layers}"], [Point(less / work, Estimate.of(whole - part))])
    last, question = list(asked.items())[-1]
    pairs = {PAIRS: pairs_of(question, folder / f"{PAIRS}-of-{last}")}
    seen = Seen.of(variant(folder, f"store-of-{PAIRS}-of-{last}", pairs, epochs), PAIRS, pairs[PAIRS], precision)
    keep(PAIRS, drops, served(seen, ()))
    return {way: {at: mean_of(points) for at, points in own.items()} for way, own in found.items()}
