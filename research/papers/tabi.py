"""`python -m research.papers tabi`: Tabi's ways to spare work, offline, on the exits that `hplm bench cascade` has built.

A way is chosen by the dev texts, and judged by the labels of the test texts. Work is the share of the layers' work left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.cascade import FOLDER, AnsweredTexts, ExitResult, Judged, described, judged
from bench.rows import EngineDtype, Rows, Whole, benchmark, rows_of
from builder.evaluation.evaluation import opened
from builder.exits.answers import LOOK, costs_of
from builder.exits.build import DROPS
from builder.exits.thresholds import Estimate, within
from builder.publish.precision import served_precision
from builder.store.store import Store
from builder.tasks.tasks import training_task
from demo.data import MANIFEST, DemoTenant, data_of
from hplm.adapters.groups import Tiles
from hplm.arrays import Array
from hplm.engine.engine import Precision, resolve_device
from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention

KEEPS = (0.9, 0.8, 0.65, 0.5)  # shares of the words that stay
PRICES = np.geomspace(200, 0.02, 60)  # of a text with another answer, in passes through all layers
NEVER = 2.0
WEIGHTS = np.linspace(0, 1, 21)


class Leaves(NamedTuple):
    """Where texts leave."""

    part: AnsweredTexts  # the texts, and what they are answered
    exits: Array  # of each text: the exit
    looks: Array  # of each text: the exits that were looked at


Choosing = Callable[[AnsweredTexts, AnsweredTexts], Iterable[Leaves]]  # by the first part, where texts of the second leave


@benchmark(tenants=1)
def tabi(*, dtype: EngineDtype = "auto", tenants: Whole = 100) -> Rows:
    """Compares Tabi's ways to spare work: means over tenants of the work of the layers, and of points lost by labels.

    Thresholds for several exits, weighted ensembles, words pruned by attention, votes, one exit for all, and the bound. Each
    by the points that it may lose, or by the share of words that stay.

    :param dtype: precision of the full stack
    :param tenants: at most
    """
    if not (FOLDER / "demo" / MANIFEST).exists():
        raise InvalidInput(f"{FOLDER} has no questions: `hplm bench cascade` builds some")
    store = Store(FOLDER / "store")
    precision = served_precision(store, dtype, resolve_device("auto"))
    found: dict[str, dict[str, list[ExitResult]]] = {}
    for question in data_of(FOLDER / "demo").tenants[:tenants]:
        own = judged(store, question, precision)
        for name, ways in WAYS.items():
            tried = [_way(own, leaves) for leaves in ways(own.choosing, own.test)]
            drops = [f"{drop:g}" for drop in DROPS] if len(tried) > 1 else ["-"]
            for drop, way in zip(drops, tried, strict=True):
                found.setdefault(name, {}).setdefault(drop, []).append(way)
        for keep, way in zip(KEEPS, pruned(store, question, precision, own), strict=True):
            found.setdefault("words pruned", {}).setdefault(f"{keep:g}", []).append(way)
    for name, own in found.items():
        yield from rows_of({drop: described(ways) for drop, ways in own.items()}, at=f"ways/{name}/")


def _way(own: Judged, leaves: Leaves) -> ExitResult:
    right = leaves.part.right[leaves.exits, np.arange(len(leaves.exits))]
    return ExitResult(_work(leaves), Estimate.of(own.test.right[-1] - right))


def _work(leaves: Leaves) -> float:
    answered = leaves.part.answered
    return float((answered.costs[leaves.exits] + LOOK * leaves.looks) @ answered.weights / answered.weights.sum())


def served(choosing: AnsweredTexts, judged: AnsweredTexts) -> Iterable[Leaves]:
    """One exit and its threshold, as `hplm tenant exits` chooses them."""
    for leaving in within(choosing.answered, DROPS):
        left = judged.answered.exits_of(leaving)
        yield Leaves(judged, left, np.full(len(left), leaving.exit is not None))


def several(choosing: AnsweredTexts, judged: AnsweredTexts) -> Iterable[Leaves]:
    """Rerouting (Eq. 4 and 5): an exit a level, each with a threshold of its calibrated confidence. All are chosen together."""
    tried: list[tuple[float, float, list[float]]] = []  # work, loss, thresholds
    for thresholds in _by_price(choosing):
        leaves = _by_thresholds(choosing, thresholds)
        tried.append((_work(leaves), 100 * _likely(choosing.answered.losses_of(leaves.exits)), thresholds))
    for drop in DROPS:
        able = [one for one in tried if one[1] <= drop] or tried[:1]  # an ensemble may lose more where no text leaves
        yield _by_thresholds(judged, min(able)[2])


def ensemble(choosing: AnsweredTexts, judged: AnsweredTexts) -> Iterable[Leaves]:
    """The weighted ensemble (Eq. 6): a text's answer is that of the exits that it has passed. Held-out NLL chooses weights."""
    mixed, weights = _mixed(choosing, None)
    yield from several(mixed, _mixed(judged, weights)[0])


def cheapest(choosing: AnsweredTexts, judged: AnsweredTexts) -> Iterable[Leaves]:
    """As INFaaS chooses a model: all texts leave at the cheapest exit that loses little enough."""
    exits, texts = len(choosing.answered.confidences), len(judged.wanted_numbers)
    losses = [100 * _likely(own) for own in choosing.answered.losses]
    for drop in DROPS:
        exit = next((exit for exit in range(exits) if losses[exit] <= drop), exits)
        yield Leaves(judged, np.full(texts, exit), np.full(texts, exit < exits))


def vote(choosing: AnsweredTexts, judged: AnsweredTexts) -> Iterable[Leaves]:
    """A text leaves at the first exit that says the same as the one before."""
    same = judged.labels[1:] == judged.labels[:-1]
    same[-1] = True
    left = same.argmax(axis=0) + 1
    yield Leaves(judged, left, np.minimum(left + 1, len(same)))


def oracle(choosing: AnsweredTexts, judged: AnsweredTexts) -> Iterable[Leaves]:
    """The bound: a text leaves at the first exit that has the full stack's answer, and no look costs anything."""
    left = (judged.labels == judged.labels[-1]).argmax(axis=0)
    yield Leaves(judged, left, np.zeros(len(left)))


WAYS: dict[str, Choosing] = {
    "one exit (served)": served,
    "several exits": several,
    "weighted ensemble": ensemble,
    "one exit for all": cheapest,
    "vote": vote,
    "oracle": oracle,
}


def _exits_of(part: AnsweredTexts, thresholds: Sequence[float]) -> Array:
    sure = part.answered.confidences >= np.array(thresholds)[:, None]
    return np.where(sure.any(axis=0), sure.argmax(axis=0), len(thresholds))


def _by_thresholds(part: AnsweredTexts, thresholds: Sequence[float]) -> Leaves:
    left = _exits_of(part, thresholds)
    open_before = np.cumsum([0, *(threshold < NEVER for threshold in thresholds)])
    return Leaves(part, left, open_before[np.minimum(left + 1, len(thresholds))])


def _likely(losses: Array) -> float:
    """Returns a mean with its standard error."""
    return float(losses.mean() + losses.std() / sqrt(len(losses)))


def _by_price(part: AnsweredTexts) -> list[list[float]]:
    """Returns thresholds for each price of a loss: one exit's after the other is set to what costs least in all."""
    answered = part.answered
    weights = answered.weights / answered.weights.sum()
    now, found = [NEVER] * len(answered.confidences), [[NEVER] * len(answered.confidences)]
    for price in PRICES.tolist():
        losses = price * answered.losses / len(weights)
        for _ in range(3):
            stays = weights * answered.costs[-1] + losses[-1]
            for exit in reversed(range(len(now))):
                reaches = _exits_of(part, [*now[:exit], *[NEVER] * (len(now) - exit)]) == len(now)
                leaves = weights * answered.costs[exit] + losses[exit]
                now[exit] = _best(answered.confidences[exit][reaches], (stays - leaves)[reaches], LOOK * weights[reaches].sum())
                if now[exit] < NEVER:
                    stays = np.where(answered.confidences[exit] >= now[exit], leaves, stays) + LOOK * weights
        found.append(list(now))
    return found


def _best(sure: Array, gains: Array, looks: float) -> float:
    order = np.argsort(-sure, kind="stable")
    total = np.cumsum(gains[order])
    last = int(total.argmax()) if len(total) else 0
    return float(sure[order][last]) if len(total) and total[last] > looks else NEVER


def _mixed(part: AnsweredTexts, weights: Sequence[float] | None) -> tuple[AnsweredTexts, Sequence[float]]:
    """Returns the part with the answers of ensembles, and their weights, which its labels choose if none are given."""
    texts, right = np.arange(len(part.wanted_numbers)), part.wanted_numbers
    mixed, chosen = [part.probabilities[0]], list[float]()
    for level, own in enumerate(part.probabilities[1:]):
        able = WEIGHTS if weights is None else weights[level : level + 1]
        tried = [weight * own + (1 - weight) * mixed[-1] for weight in able]
        best = int(np.argmin([-np.log(one[texts, right] + 1e-9).mean() for one in tried]))
        chosen.append(float(able[best]))
        mixed.append(tried[best])
    labels = np.array([one.argmax(axis=1) for one in mixed])
    full = part.probabilities[-1]
    losses = np.array([full.max(axis=1) - full[texts, own] for own in labels])
    return replace(part, labels=labels, answered=replace(part.answered, losses=losses)), chosen


def pruned(store: Store, question: DemoTenant, precision: Precision, own: Judged) -> list[ExitResult]:
    """Word pruning (4.2): behind the first layer only the words stay that its attention looks at most, and [CLS]."""
    tenant, task = store.known_tenant(question.id), training_task(question.task)
    opening = opened(store, store.knowledge(tenant), task.read(question.test), resolve_device("auto"), precision)
    first = float(costs_of(store.config, 1 / own.tokens)[1])  # the work of the first layer
    right = [_pruned_labels(*opening, keep) == own.test.wanted_numbers for keep in KEEPS]
    lost = [Estimate.of(own.test.right[-1] - one) for one in right]
    return [ExitResult(first + keep * (1 - first), one) for keep, one in zip(KEEPS, lost, strict=True)]


@torch.inference_mode()
def _pruned_labels(body, model, data, keep: float) -> Array:
    texts = data.dev
    found = np.empty(len(texts.texts), dtype=np.int64)
    for some, pack in data.packs(texts):
        x, *_ = body.below(pack)
        looked = Looked(pack.lengths, body.upper.heads)
        kept, lengths = None, pack.lengths
        for number, layer in enumerate(body.upper_layers):
            every = Tiles(np.array([0]), np.array([len(x)]), x.device)
            attend = looked if number == 0 else PackedAttention(lengths, body.upper.heads, x.device)
            x = layer(x, attend, model.adapts(every, every)[number])
            if number == 0:
                kept, lengths = looked.most(keep)
                x = x.index_select(0, kept)
        first = torch.tensor(np.cumsum([0, *lengths[:-1]]), device=x.device)
        found[some] = model.read(x[first].float()).argmax(dim=1).cpu().numpy()
    return found


class Looked:
    """Attention that also says how much each token is looked at, by all heads and tokens of its text."""

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        self._lengths, self._heads = list(lengths), heads
        self._looks: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for own in zip(query.split(self._lengths), key.split(self._lengths), strict=True):
            q, k = (one.float().view(len(one), self._heads, -1).transpose(0, 1) for one in own)
            self._looks.append(torch.softmax(q @ k.mT / sqrt(q.shape[-1]), dim=-1).sum(dim=(0, 1)))
        return PackedAttention(self._lengths, self._heads, query.device)(layer, query, key, value)

    def most(self, keep: float) -> tuple[Tensor, list[int]]:
        """Returns the tokens that are looked at most, the first of each text among them, and how many each text has."""
        kept: list[Tensor] = []
        start = 0
        for looks in self._looks:
            looks[0] = torch.inf
            kept.append(start + looks.topk(max(1, round(keep * len(looks)))).indices.sort().values)
            start += len(looks)
        return torch.cat(kept), [len(one) for one in kept]
