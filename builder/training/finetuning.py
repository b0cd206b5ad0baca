"""Fine-tuning of a tenant: adapter and head learn, the shared layers stay as they are (HMI, observation O2)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.learning.bodies import Body
from builder.learning.limits import Epochs, check_options, check_rank
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.progress import Exam, Progress
from builder.tasks.lookup import Pack, Texts
from builder.tasks.scores import Scores
from builder.training.cutting import cut, cuttable, hold
from builder.training.data import Data
from builder.training.model import TenantModel
from hplm.adapters.layout import Layout, adapter_layout, every_place, head_layout
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.tenants.embedding import Embedding


@dataclass(frozen=True)
class TrainingOptions:
    adapter: str = "bottleneck"
    rank: int = 32  # 0: a head alone
    places: tuple[str, ...] | None = None  # the projections that the adapter works on; default: the usual ones of its kind
    function: str = "relu"  # inside a bottleneck
    head_function: str | None = None  # between the two layers of a head; None: the head has one layer
    dtype: str = "fp16"  # of the stored adapter and head
    epochs: int = 4  # at most
    patience: int = 3  # epochs without a better dev score before training ends
    doubt: float = 2.0  # a later epoch is kept if it is at most so many standard errors worse than the best
    learning_rate: float = 2e-3
    body_rate: float = 0.0  # of the otherwise shared layers; with a rank above 0, the adapter becomes their change
    body_part: str = "all"  # or "lower", "upper": which layers of a whole model learn
    weight_decay: float = 0.01
    warm_up: float = 0.1  # a share of the steps
    batch_texts: int = 8
    seed: int = 0
    embedding: Embedding | None = None  # how the tenant makes vectors; None: it has a head

    def __post_init__(self) -> None:
        check_options(self, epochs=1, patience=1, batch_texts=1, rank=0, doubt=0)
        if self.body_rate < 0:
            raise InvalidInput(f"upper rate {self.body_rate}: give a number above 0, or 0 for layers that do not learn")
        if self.cut and self.adapter != "lora":
            raise InvalidInput(f"an adapter of kind {self.adapter!r} cannot hold the change of the upper layers: choose lora")

    @property
    def cut(self) -> bool:
        """Whether the upper layers learn and the adapter is cut from their change."""
        return self.body_rate > 0 and self.rank > 0

    def worked_on(self, config: BackboneConfig) -> tuple[str, ...] | None:
        """Returns the projections, if they are not the usual ones of the adapter's kind."""
        return self.places or (every_place(config) if self.cut else None)


@dataclass(frozen=True)
class Trained:
    body: Body
    model: TenantModel
    scores: Scores  # on dev, of the answers as served
    report: dict[str, Any]


Answering = Callable[[Any, Pack], Tensor]  # gives logits, on a body: a tenant's adapter and head, or its students
Train = Callable[..., Trained]  # `finetune`, or another function that is called like it


def tenant_model(config: BackboneConfig, labels: int, options: TrainingOptions) -> TenantModel:
    has_head = not config.is_decoder and options.embedding is None
    head = head_layout(config, labels, options.head_function, options.dtype) if has_head else None
    return TenantModel(adapter_of(config, options), head, options.seed, options.embedding)


def adapter_of(config: BackboneConfig, options: TrainingOptions) -> Layout | None:
    check_rank(options.rank, config.hidden)
    return adapter_layout(config, options.adapter, options.rank, options.worked_on(config), options.function, options.dtype)


def finetune(
    body: Body, data: Data, options: TrainingOptions, saved: Path | None = None,
    further: Callable[[np.ndarray, Tensor], Tensor] | None = None,
) -> Trained:  # fmt: skip
    """Trains adapter and head, and the body if it has a learning rate.

    If the adapter is to hold the body's change, the body is cut after each epoch to what the adapter holds, and learns on.
    Of the epochs that the dev set cannot tell from the best, the last is kept: its steps were the smallest.
    The same call after an interruption continues from `saved`, and ends with the same numbers.
    `further` returns a loss beside that of the labels, from the numbers of a batch's texts and their logits.
    """
    body.to(data.device).eval().requires_grad_(False)
    layout = adapter_of(data.config, options) if options.cut else None  # of the adapter that is cut
    shared = copy.deepcopy(body) if layout is not None else body  # the body as it was
    layers = shared.upper_layers, body.upper_layers
    model = tenant_model(data.config, len(data.labels), replace(options, rank=0) if options.cut else options).to(data.device)
    model.mean, model.spread = data.task.scale(data.train.examples)
    if data.start is not None:
        adapter, head = data.start
        if layout is not None and adapter is not None:
            own = [{name: part.to(data.device, torch.float32) for name, part in layer.items()} for layer in adapter]
            hold(*layers, own, layout)
        model.go_on(None if layout is not None else adapter, head)
    groups = [ParameterGroup(options.learning_rate, dict(model.named_parameters("model")))]
    if options.body_rate:
        tuned = cuttable(body.upper_layers, layout) if layout is not None else body.part(options.body_part)
        groups.append(ParameterGroup(options.body_rate, {f"body.{number}": part for number, part in enumerate(tuned)}))
    batches = data.batches(options.epochs, data.task.batch_texts or options.batch_texts, options.seed)
    epochs = Epochs(batches, options.patience, options.doubt, options.warm_up)

    def loss_of(chosen: np.ndarray) -> tuple[Tensor, int]:
        pack = data.reader.pack(data.train, chosen, data.device)
        logits = model(body, pack)
        loss, learned = data.task.loss(logits, pack.targets, pack.rows_of, model.spread)
        loss = loss / max(1, learned)
        return loss + further(chosen, logits) if further is not None else loss, len(chosen)

    def cut_body() -> dict[str, float]:
        """Cuts the body's change to the adapter's form. Returns the share of it that is left; empty if nothing is cut."""
        if layout is None:
            return {}
        adapter, held = cut(*layers, layout)
        hold(*layers, adapter, layout)
        return {"change_held": held}

    def examined() -> Exam:
        scores, loss = evaluate(body, model, data, data.dev)
        return Exam(scores.main, loss, scores.error)

    training = Training(
        "training", data.device, groups, epochs.starting, loss_of, examined,
        f"Use a smaller --learning-rate{' and --upper-rate' if options.body_rate else ''}", cut_body,
        start_counts=data.start is not None, decay=options.weight_decay, betas=(0.9, 0.999),
    )  # fmt: skip
    now, made = train(training, epochs, saved), model
    if layout is not None:
        made = tenant_model(data.config, len(data.labels), options).to(data.device)
        made.load(cut(*layers, layout)[0], {name: tensor[0] for name, tensor in model.head.items()})
        made.mean, made.spread = model.mean, model.spread
    if data.task.shift is not None:
        read = data.rows(data.dev, logits_of(shared, made, data, data.dev))
        made.shift(data.task.shift(data.labels, data.dev.examples, *zip(*read, strict=True)))
    made.round_to_storage()
    return Trained(shared, made, evaluate(shared, made, data, data.dev)[0], {**reported(options), **_reported(now, data)})


def reported(options: TrainingOptions) -> dict[str, Any]:
    """Returns the options as reports have them: those for vectors only of such a tenant."""
    return {name: value for name, value in asdict(options).items() if name != "embedding" or value is not None}


def _reported(now: Progress, data: Data) -> dict[str, Any]:
    """Returns what a tenant's report says of its training: epochs have numbers from 1, and the start is 0."""
    first, kept = 0 if data.start is not None else 1, now.exams[now.kept]
    return {
        "epochs_run": len(now.exams) - 1 + first,
        "best_epoch": now.best + first,
        "kept_epoch": now.kept + first,
        **({"change_held": round(kept["change_held"], 4)} if "change_held" in kept else {}),
        **({"at_start": {"dev": round(now.exams[0]["score"], 5)}} if data.start is not None else {}),
        **now.reported(),
    }


def evaluate(body: Body, model: TenantModel, data: Data, texts: Texts) -> tuple[Scores, float]:
    """Returns the scores and the mean loss."""
    total = learned = 0.0

    def logits(body: Body, pack: Pack) -> Tensor:
        nonlocal total, learned
        found = model(body, pack)
        loss, count = data.task.loss(found, pack.targets, pack.rows_of, model.spread)
        total, learned = total + float(loss), learned + count
        return found

    return data.scored(texts, logits_of(body, logits, data, texts)), total / max(1, learned)


def logits_of(body: Body, model: Answering, data: Data, texts: Texts) -> list[np.ndarray]:
    """Returns the logits of each text's rows."""
    return [own.numpy() for own in data.by_text(texts, partial(model, body))]
