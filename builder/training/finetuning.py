"""Fine-tuning of a tenant: adapter and head learn, the shared layers stay as they are (HMI, observation O2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
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


@dataclass
class _Course:
    """The progress of a training without its weights, as a savepoint holds it."""

    step: int = 0
    best: float = -math.inf
    best_loss: float = math.inf
    best_epoch: int = 0
    least: float = -math.inf  # the dev score from which on a later epoch is kept
    kept_epoch: int = 0
    loss_sum: float = 0.0  # of the current epoch
    seconds: float = 0.0  # of earlier, interrupted runs
    at_start: dict[str, float] = field(default_factory=dict)  # dev score and loss of the weights that are trained on
    history: list[dict[str, float]] = field(default_factory=list)

    def takes(self, epoch: int, scores: Scores, dev_loss: float, doubt: float) -> bool:
        """Returns whether the weights after this epoch are to be kept, unless later ones are."""
        if (scores.main, -dev_loss) > (self.best, -self.best_loss):
            self.best, self.best_loss, self.best_epoch = scores.main, dev_loss, epoch
            self.least = scores.main - doubt * scores.error
        if scores.main < self.least:
            return False
        self.kept_epoch = epoch
        return True


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
    body = body.to(ground.device).eval().requires_grad_(False)
    labels, layout = len(ground.labels), adapter_of(ground.config, options)
    cutting = Cutting(learnable(body), layout) if options.cut and layout is not None else None
    if cutting is not None:
        learned = cutting.parameters()
    else:
        learned = learnable(body).part(options.body_part) if options.body_rate else ()
    tuned = [parameter.requires_grad_() for parameter in learned]
    model = tenant_model(ground.config, labels, replace(options, rank=0) if cutting is not None else options).to(ground.device)
    scale = ground.task.scale([text.example for text in ground.texts.texts])
    if ground.start is None:
        model.mean, model.spread = scale
    else:
        adapter, head = ground.start
        if cutting is not None and adapter is not None:
            cutting.hold([{name: part.to(ground.device, torch.float32) for name, part in layer.items()} for layer in adapter])
        model.go_on(None if cutting is not None else adapter, head, *scale)
    learner = nn.ModuleDict({"model": model, "body": body} if tuned else {"model": model})
    groups = [{"params": list(model.parameters()), "peak": options.learning_rate}]
    if tuned:
        groups.append({"params": tuned, "peak": options.body_rate})
    optimizer = torch.optim.AdamW(groups, weight_decay=options.weight_decay, fused=True)
    rng = np.random.default_rng(options.seed)
    epochs = [list(packed_batches(ground.texts.lengths, PACK_TOKENS, options.batch_texts, rng)) for _ in range(options.epochs)]
    total = sum(len(epoch) for epoch in epochs)

    in_half = half_precision(ground.device)
    started, savepoint, course, kept_state = time.monotonic(), Savepoint(saved), _Course(), {}
    if (state := savepoint.load()) is not None:
        learner.load_state_dict(state["learner"])
        optimizer.load_state_dict(state["optimizer"])
        course, kept_state = _Course(**state["course"]), state["kept"]

    def save() -> None:
        seconds = course.seconds + time.monotonic() - started
        savepoint.save(
            {
                "learner": learner.state_dict(),
                "optimizer": optimizer.state_dict(),
                "course": asdict(course) | {"seconds": seconds},
                "kept": kept_state,
            }
        )

    def kept() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in learner.state_dict().items()}

    if ground.start is not None and not course.at_start:
        scores, dev_loss = evaluate(body, model, ground, ground.dev)
        course.at_start = {"dev": scores.main, "dev_loss": dev_loss}
        if course.takes(0, scores, dev_loss, options.doubt):
            kept_state = kept()
    first = 0
    with tqdm(total=total, initial=course.step, desc="training", unit="step", disable=not show_progress) as bar:
        for epoch, chosen in enumerate(epochs, start=1):
            for some in chosen[max(0, course.step - first) :]:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * _warm_up_then_decay(total, options.warm_up, course.step)
                pack = ground.reader.pack(ground.texts, some, ground.device, body.reads_tables)
                with in_half, dropout(body, options.dropout, (options.seed, course.step)):
                    logits = model(body, pack)
                loss = _loss(logits, pack, ground.task, model.spread)
                if further is not None:
                    loss = loss + further(pack, logits)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
                optimizer.step()
                course.step += 1
                course.loss_sum += loss.item()
                bar.update()
                bar.set_postfix_str(_said(loss.item(), course))
                if savepoint.due:
                    save()
            first += len(chosen)
            if len(course.history) < epoch:
                mean_loss = course.loss_sum / len(chosen)
                if not math.isfinite(mean_loss):
                    raise Diverged("training diverged, the loss is NaN: use a smaller --learning-rate")
                held = {}
                if cutting is not None:
                    adapter, held["change_held"] = cutting.cut()
                    cutting.hold(adapter)
                scores, dev_loss = evaluate(body, model, ground, ground.dev)
                course.history.append({"epoch": epoch, "loss": mean_loss, "dev_loss": dev_loss, "dev": scores.main, **held})
                course.loss_sum = 0.0
                if course.takes(epoch, scores, dev_loss, options.doubt):
                    kept_state = kept()
                bar.set_postfix_str(_said(mean_loss, course))
                save()
            if epoch - course.best_epoch >= options.patience:
                break

    learner.load_state_dict(kept_state)
    held = {}
    if cutting is not None:
        adapter, _ = cutting.cut()
        whole, model = model, tenant_model(ground.config, labels, options).to(ground.device)
        model.put(adapter, whole)
        held_after = {entry["epoch"]: entry["change_held"] for entry in course.history}
        body, held = cutting.shared, {"change_held": round(held_after.get(course.kept_epoch, 1.0), 4)}
    if ground.task.shift is not None:
        read, _ = rows_of(body, model, ground, ground.dev)
        model.shift(ground.task.shift(ground.labels, ground.dev.examples, *zip(*read, strict=True)))
    model.round_to_storage()
    at_start = {"at_start": {name: round(value, 5) for name, value in course.at_start.items()}} if course.at_start else {}
    report = {
        **asdict(options),
        "epochs_run": len(course.history),
        "best_epoch": course.best_epoch,
        "kept_epoch": course.kept_epoch,
        **held,
        **at_start,
        "history": [{name: round(value, 5) for name, value in entry.items()} for entry in course.history],
        "seconds": round(course.seconds + time.monotonic() - started, 1),
    }
    return Trained(body, model, evaluate(body, model, ground, ground.dev)[0], report)


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


def _said(loss: float, course: _Course) -> str:
    dev = f", dev {course.history[-1]['dev']:.3f} (best {course.best:.3f})" if course.history else ""
    return f"loss {loss:.3f}{dev}"


def _warm_up_then_decay(steps: int, warm_up: float, step: int) -> float:
    return min((step + 1) / (warm_up * steps + 1), (steps - step) / steps)
