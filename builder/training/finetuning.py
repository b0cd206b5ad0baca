"""Fine-tuning of a tenant: adapter and head learn, the shared layers stay as they are (HMI, observation O2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from builder.hardware import half_precision
from builder.options import check_seed
from builder.packed_batches import packed_batches
from builder.store.savepoint import Savepoint
from builder.training.bodies import Body, learnable
from builder.training.course import Course
from builder.training.cutting import Cutting
from builder.training.dropout import dropout
from builder.training.examples import Pack, Reader, Texts
from builder.training.model import Diverged, TenantModel, Weights
from builder.training.scores import Scores
from builder.training.tasks import TrainingTask
from hplm.adapters.layout import PROJECTIONS, Layout, adapter_layout, head_layout
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig

PACK_TOKENS = 8192  # bounds memory; `batch_texts` bounds what a step learns from


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
    body_part: str = "all"  # or "lower", "upper": which layers of a whole BERT learn
    weight_decay: float = 0.01
    dropout: float = 0.0  # share of the hidden states that a step leaves out
    warm_up: float = 0.1  # a share of the steps
    batch_texts: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.rank < 0:
            raise InvalidInput(f"rank {self.rank}: give a positive number, or 0 for a head without adapter")
        for name in ("epochs", "patience", "batch_texts"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} {getattr(self, name)}: give 1 or more")
        if self.learning_rate <= 0:
            raise InvalidInput(f"learning rate {self.learning_rate}: give a number above 0")
        if self.doubt < 0:
            raise InvalidInput(f"doubt {self.doubt}: give 0 standard errors or more")
        if not 0 <= self.dropout < 1:
            raise InvalidInput(f"dropout {self.dropout}: give 0 or more, below 1")
        if self.body_rate < 0:
            raise InvalidInput(f"upper rate {self.body_rate}: give a number above 0, or 0 for layers that do not learn")
        if self.cut and self.adapter != "lora":
            raise InvalidInput(f"an adapter of kind {self.adapter!r} cannot hold the change of the upper layers: choose lora")

    @property
    def cut(self) -> bool:
        """Whether the upper layers learn and the adapter is cut from their change."""
        return self.body_rate > 0 and self.rank > 0

    @property
    def worked_on(self) -> tuple[str, ...] | None:
        """The projections, if they are not the usual ones of the adapter's kind."""
        return self.places or (tuple(PROJECTIONS) if self.cut else None)


@dataclass(frozen=True)
class Ground:
    """The data and the task of a training, the same for every option and every body."""

    config: BackboneConfig
    reader: Reader
    texts: Texts
    dev: Texts
    task: TrainingTask
    labels: list[str]
    device: torch.device
    start: tuple[list[Weights] | None, Weights] | None = None  # the adapter, layer by layer, and the head to train on


@dataclass(frozen=True)
class Trained:
    body: Body
    model: TenantModel
    scores: Scores  # on dev, of the answers as served
    report: dict[str, Any]


Train = Callable[..., Trained]  # `train`, or another function that is called like it


def tenant_model(config: BackboneConfig, labels: int, options: TrainingOptions) -> TenantModel:
    head = head_layout(config, labels, options.head_function, options.dtype)
    return TenantModel(adapter_of(config, options), head, options.seed)


def adapter_of(config: BackboneConfig, options: TrainingOptions) -> Layout | None:
    return adapter_layout(config, options.adapter, options.rank, options.worked_on, options.function, options.dtype)


def train(
    body: Body,
    ground: Ground,
    options: TrainingOptions,
    saved: Path | None = None,
    show_progress: bool = True,
    further: Callable[[Pack, Tensor], Tensor] | None = None,
) -> Trained:
    """Trains adapter and head with AdamW, and the body if it has a learning rate.

    If the adapter is to hold the body's change, the body is cut after each epoch to what the adapter holds, and learns on.
    Of the epochs that the dev set cannot tell from the best, the last is kept: its steps were the smallest.
    The same call after an interruption continues from `saved`, and ends with the same numbers.
    `further` returns a loss beside that of the labels, from a batch and its logits.
    """
    learner = _Learner(body.to(ground.device).eval().requires_grad_(False), ground, options)
    rng = np.random.default_rng(options.seed)
    epochs = [list(packed_batches(ground.texts.lengths, PACK_TOKENS, options.batch_texts, rng)) for _ in range(options.epochs)]
    total, first = sum(len(epoch) for epoch in epochs), 0
    training = _Training(learner, ground, options, Savepoint(saved))
    course = training.course
    with tqdm(total=total, initial=course.step, desc="training", unit="step", disable=not show_progress) as bar:
        for epoch, chosen in enumerate(epochs, start=1):
            for some in chosen[max(0, course.step - first) :]:
                learner.set_rate(_warm_up_then_decay(total, options.warm_up, course.step))
                loss = training.step(some, further)
                bar.set_postfix_str(f"loss {loss:.3f}{course}", refresh=False)
                bar.update()
                training.save_if_due()
            first += len(chosen)
            if len(course.history) < epoch:
                mean_loss = training.end_epoch(epoch, len(chosen))
                bar.set_postfix_str(f"loss {mean_loss:.3f}{course}")
                training.save()
            if epoch - course.best_epoch >= options.patience:
                break

    body, model, held = learner.finished(training.kept, course)
    if ground.task.shift is not None:
        read, _ = rows_of(body, model, ground, ground.dev)
        model.shift(ground.task.shift(ground.labels, ground.dev.examples, *zip(*read, strict=True)))
    model.round_to_storage()
    report = {**asdict(options), **course.reported(held), "seconds": round(training.seconds, 1)}
    return Trained(body, model, evaluate(body, model, ground, ground.dev)[0], report)


class _Learner:
    """All weights that learn: adapter and head, and those of the body if it has a learning rate."""

    def __init__(self, body: Body, ground: Ground, options: TrainingOptions) -> None:
        self.body, self._ground, self._options = body, ground, options
        labels, layout = len(ground.labels), adapter_of(ground.config, options)
        self._cutting = Cutting(learnable(body), layout) if options.cut and layout is not None else None
        if self._cutting is not None:
            learned = self._cutting.parameters()
        else:
            learned = learnable(body).part(options.body_part) if options.body_rate else ()
        tuned = [parameter.requires_grad_() for parameter in learned]
        own = options if self._cutting is None else replace(options, rank=0)
        self.model = tenant_model(ground.config, labels, own).to(ground.device)
        self._start()
        self.module = nn.ModuleDict({"model": self.model, "body": body} if tuned else {"model": self.model})
        groups = [{"params": list(self.model.parameters()), "peak": options.learning_rate}]
        if tuned:
            groups.append({"params": tuned, "peak": options.body_rate})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=options.weight_decay, fused=True)

    def _start(self) -> None:
        """Takes the scale of the labels, and the adapter and the head to train on."""
        ground, cutting = self._ground, self._cutting
        scale = ground.task.scale([text.example for text in ground.texts.texts])
        if ground.start is None:
            self.model.mean, self.model.spread = scale
            return
        adapter, head = ground.start
        if cutting is not None and adapter is not None:
            cutting.hold([{name: part.to(ground.device, torch.float32) for name, part in layer.items()} for layer in adapter])
        self.model.go_on(None if cutting is not None else adapter, head, *scale)

    def set_rate(self, share: float) -> None:
        """`share`: of each group's highest learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share

    def learn(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise Diverged(
                f"training diverged, the loss is {loss.item():g} and its gradient {norm.item():g}: use a smaller "
                f"--learning-rate{' and --upper-rate' if self._options.body_rate else ''}"
            )
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def cut(self) -> dict[str, float]:
        """Cuts the body's change to the adapter's form. Returns the share of it that is left; empty if nothing is cut."""
        if self._cutting is None:
            return {}
        adapter, held = self._cutting.cut()
        self._cutting.hold(adapter)
        return {"change_held": held}

    def finished(self, kept: dict[str, Tensor], course: Course) -> tuple[Body, TenantModel, dict[str, float]]:
        """Returns the body and the model with the kept weights, and the fact that only a cut training reports."""
        self.module.load_state_dict(kept)
        if self._cutting is None:
            return self.body, self.model, {}
        adapter, _ = self._cutting.cut()
        model = tenant_model(self._ground.config, len(self._ground.labels), self._options).to(self._ground.device)
        model.put(adapter, self.model)
        held_after = {entry["epoch"]: entry["change_held"] for entry in course.history}
        return self._cutting.shared, model, {"change_held": round(held_after.get(course.kept_epoch, 1.0), 4)}


class _Training:
    """A training from its beginning or its savepoint on, step by step."""

    def __init__(self, learner: _Learner, ground: Ground, options: TrainingOptions, savepoint: Savepoint) -> None:
        self._learner, self._ground, self._options, self._savepoint = learner, ground, options, savepoint
        self._in_half, self._started = half_precision(ground.device), time.monotonic()
        self.course = Course()
        self.kept: dict[str, Tensor] = {}  # the weights of the kept epoch
        if (state := savepoint.load()) is not None:
            learner.module.load_state_dict(state["learner"])
            learner.optimizer.load_state_dict(state["optimizer"])
            self.course, self.kept = Course(**state["course"]), state["kept"]
        if ground.start is not None and not self.course.at_start:
            scores, dev_loss = self._take(0)
            self.course.at_start = {"dev": scores.main, "dev_loss": dev_loss}

    @property
    def seconds(self) -> float:
        return self.course.seconds + time.monotonic() - self._started

    def save_if_due(self) -> None:
        if self._savepoint.due:
            self.save()

    def save(self) -> None:
        learner = self._learner
        self._savepoint.save(
            {
                "learner": learner.module.state_dict(),
                "optimizer": learner.optimizer.state_dict(),
                "course": asdict(self.course) | {"seconds": self.seconds},
                "kept": self.kept,
            }
        )

    def step(self, chosen: np.ndarray, further: Callable[[Pack, Tensor], Tensor] | None) -> float:
        """Learns from a batch, and returns its loss."""
        body, model, ground = self._learner.body, self._learner.model, self._ground
        pack = ground.reader.pack(ground.texts, chosen, ground.device, body.reads_tables)
        with self._in_half, dropout(body, self._options.dropout, (self._options.seed, self.course.step)):
            logits = model(body, pack)
        loss = _loss(logits, pack, ground.task, model.spread)
        if further is not None:
            loss = loss + further(pack, logits)
        self._learner.learn(loss)
        self.course.step += 1
        self.course.loss_sum += loss.item()
        return loss.item()

    def end_epoch(self, epoch: int, steps: int) -> float:
        """Scores the weights, keeps them if they are to be kept, and returns the mean loss."""
        course = self.course
        mean_loss = course.loss_sum / steps
        held = self._learner.cut()
        scores, dev_loss = self._take(epoch)
        course.history.append({"epoch": epoch, "loss": mean_loss, "dev_loss": dev_loss, "dev": scores.main, **held})
        course.loss_sum = 0.0
        return mean_loss

    def _take(self, epoch: int) -> tuple[Scores, float]:
        scores, dev_loss = evaluate(self._learner.body, self._learner.model, self._ground, self._ground.dev)
        if self.course.takes(epoch, scores, dev_loss, self._options.doubt):
            self.kept = self._learner.weights()
        return scores, dev_loss


def evaluate(body: Body, model: TenantModel, ground: Ground, texts: Texts) -> tuple[Scores, float]:
    """Returns the scores and the mean loss."""
    answers, loss = answers_to(body, model, ground, texts)
    return ground.task.score(ground.labels, texts.examples, answers), loss


def answers_to(body: Body, model: TenantModel, ground: Ground, texts: Texts) -> tuple[list[list[str]], float]:
    """Returns the answers that a client would get, example by example, and the mean loss."""
    read, loss = rows_of(body, model, ground, texts)
    served, labels = ground.task.served, ground.labels
    answers = [
        served.answer(logits, spans, labels, passage=example.pair or "").labels
        for (spans, logits), example in zip(read, texts.examples, strict=True)
    ]
    return answers, loss


def rows_of(body: Body, model: TenantModel, ground: Ground, texts: Texts) -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
    """Returns spans and logits of each example's rows, over all its windows, and the mean loss."""
    logits, loss = logits_of(body, model, ground, texts)
    starts = [number for number, text in enumerate(texts.texts) if text.window == 0]
    parts = [slice(*ends) for ends in pairwise([*starts, len(logits)])]
    return [(np.concatenate([text.spans for text in texts.texts[part]]), np.concatenate(logits[part])) for part in parts], loss


@torch.inference_mode()
def logits_of(body: Body, model: TenantModel, ground: Ground, texts: Texts) -> tuple[list[np.ndarray], float]:
    """Returns the logits of each text's rows, and the mean loss."""
    found: list[np.ndarray] = [np.empty(0)] * len(texts.texts)
    total = learned = 0.0
    for some in packed_batches(texts.lengths, PACK_TOKENS, len(found)):
        pack = ground.reader.pack(texts, some, ground.device, body.reads_tables)
        logits = model(body, pack)
        loss, count = ground.task.loss(logits, pack.targets, pack.rows_of, model.spread)
        total, learned = total + float(loss), learned + count
        for i, own in zip(some, np.split(logits.float().cpu().numpy(), np.cumsum(pack.rows_of)[:-1]), strict=True):
            found[i] = own
    return found, total / max(1, learned)


def _loss(logits: Tensor, pack: Pack, task: TrainingTask, spread: float) -> Tensor:
    loss, learned = task.loss(logits, pack.targets, pack.rows_of, spread)
    return loss / max(1, learned)


def _warm_up_then_decay(steps: int, warm_up: float, step: int) -> float:
    return min((step + 1) / (warm_up * steps + 1), (steps - step) / steps)
