"""Fine-tuning a tenant: adapter and head learn, everything below them is shared and stays as it is (HMI, observation O2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from builder.packs import packs
from builder.training.examples import UNREAD, Pack, Reader, Texts
from builder.training.scores import Scores, score
from hplm.adapters.layout import Layout, adapter_layout, head_layout
from hplm.adapters.tiles import Tiles
from hplm.errors import HplmError
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.stacks import UpperStack

Weights = dict[str, Tensor]
PACK_TOKENS = 8192  # bounds memory; what a step learns from is bounded by `batch_texts`


@dataclass(frozen=True)
class TrainingOptions:
    adapter: str = "bottleneck"
    rank: int = 32  # 0: a head alone
    places: tuple[str, ...] | None = None  # that the adapter works on; default: the kind's usual ones
    dtype: str = "fp16"  # in which adapter and head are stored
    epochs: int = 4  # at most
    patience: int = 2  # epochs without a better dev score before it ends
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warm_up: float = 0.1  # share of the steps
    batch_texts: int = 8
    seed: int = 0


class TenantModel(nn.Module):
    """What a tenant owns, as a bank with a single slot; the mathematics is that of serving."""

    def __init__(self, config: BackboneConfig, adapter: Layout | None, head: Layout, seed: int) -> None:
        super().__init__()
        self._heads = config.heads
        self._adapter, self._head = adapter, head
        generator = torch.Generator().manual_seed(seed)

        def slot(layout: Layout) -> nn.ParameterDict:
            slot = nn.ParameterDict({name: torch.zeros(1, *shape) for name, shape in layout.shapes.items()})
            for name in layout.drawn:
                nn.init.normal_(slot[name], std=0.02, generator=generator)
            return slot

        # What is not drawn starts at zero: the first step sees the shared layers undisturbed.
        self.adapters = nn.ModuleList(slot(adapter) for _ in range(adapter.layers if adapter is not None else 0))
        self.head = slot(head)

    def forward(self, upper: UpperStack, pack: Pack) -> Tensor:
        device = pack.sums.device
        one = Tiles(np.zeros(len(pack.sums), dtype=np.int64), device)
        adapters = [partial(self._adapt, one, weights) for weights in self.adapters] or None
        hidden = upper(pack.sums, pack.positions, pack.segments, PackedAttention(pack.lengths, self._heads), adapters)
        rows = Tiles(np.zeros(len(pack.reading), dtype=np.int64), device)
        return self._head.read(hidden.index_select(0, pack.reading), rows, self.head)

    def _adapt(self, one: Tiles, weights: nn.ParameterDict, at: str, before: Tensor, after: Tensor) -> Tensor:
        return self._adapter.adapt(at, before, after, one, weights)

    @torch.no_grad()
    def round_to_storage(self) -> None:
        """To the precision in which banks hold it: what is scored from here on is what will be served."""
        for layout, slots in ((self._adapter, self.adapters), (self._head, [self.head])):
            for parameter in (parameter for slot in slots for parameter in slot.values()):
                parameter.copy_(parameter.to(layout.torch_dtype))
                if not parameter.isfinite().all():
                    raise HplmError("training diverged: a weight is too large to be stored; use a smaller learning rate")

    def stored(self) -> tuple[list[Weights] | None, Weights]:
        """Adapter by layer (None for a head alone) and head, without the slot dimension."""

        def unslotted(slot: nn.ParameterDict, layout: Layout) -> Weights:
            return {name: tensor.detach()[0].to(layout.torch_dtype).cpu() for name, tensor in slot.items()}

        return [unslotted(slot, self._adapter) for slot in self.adapters] or None, unslotted(self.head, self._head)

    @torch.no_grad()
    def load(self, adapter: Sequence[Weights] | None, head: Weights) -> None:
        for slot, weights in zip([*self.adapters, self.head], [*(adapter or ()), head], strict=True):
            for name, parameter in slot.items():
                parameter[0].copy_(weights[name])


@dataclass(frozen=True)
class Trained:
    model: TenantModel
    scores: Scores  # on dev, as served
    report: dict[str, Any]


def train(
    upper: UpperStack,
    config: BackboneConfig,
    reader: Reader,
    texts: Texts,
    dev: Texts,
    task: str,
    labels: int,
    options: TrainingOptions,
    device: torch.device,
    show_progress: bool = True,
) -> Trained:
    """AdamW on adapter and head; the state with the best dev score is kept."""
    started = time.monotonic()
    upper = upper.to(device).eval().requires_grad_(False)
    adapter = adapter_layout(config, options.adapter, options.rank, options.places, dtype=options.dtype)
    model = TenantModel(config, adapter, head_layout(config, labels, dtype=options.dtype), options.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    rng = np.random.default_rng(options.seed)
    epochs = [list(packs(texts.lengths, PACK_TOKENS, options.batch_texts, rng)) for _ in range(options.epochs)]
    steps = sum(len(epoch) for epoch in epochs)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_warm_up_then_decay, steps, options.warm_up))
    best, best_epoch, best_state = -1.0, 0, {}
    loss = torch.zeros((), device=device)

    with tqdm(total=steps, desc="training", unit="step", disable=not show_progress) as bar:
        for epoch, chosen in enumerate(epochs, start=1):
            for some in chosen:
                pack = reader.pack(texts, some, device)
                loss = F.cross_entropy(model(upper, pack), pack.targets, ignore_index=UNREAD, reduction="sum")
                loss = loss / max(1, int((pack.targets != UNREAD).sum()))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.update()
            reached = _dev_score(task, evaluate(upper, model, reader, dev, labels, device))
            bar.set_postfix(epoch=epoch, loss=f"{loss.item():.3f}", dev=f"{reached:.3f}")
            if reached > best:
                best, best_epoch = reached, epoch
                best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            elif epoch - best_epoch >= options.patience:
                break

    model.load_state_dict(best_state)
    model.round_to_storage()
    report = {
        **asdict(options),
        "epochs_run": epoch,
        "best_epoch": best_epoch,
        "seconds": round(time.monotonic() - started, 1),
    }
    return Trained(model, evaluate(upper, model, reader, dev, labels, device), report)


@torch.inference_mode()
def evaluate(
    upper: UpperStack, model: TenantModel, reader: Reader, texts: Texts, labels: int, device: torch.device
) -> Scores:
    targets = [text.targets for text in texts.texts]
    answers: list[np.ndarray] = [np.empty(0)] * len(targets)
    for some in packs(texts.lengths, PACK_TOKENS, len(targets)):
        pack = reader.pack(texts, some, device)
        answered = model(upper, pack).argmax(1).masked_fill(pack.targets == UNREAD, UNREAD).cpu().numpy()
        cuts = np.cumsum([len(targets[i]) for i in some])[:-1]
        for i, rows in zip(some, np.split(answered, cuts), strict=True):
            answers[i] = rows
    return score(np.concatenate(targets), np.concatenate(answers), labels)


def _dev_score(task: str, scores: Scores) -> float:
    """Most words are of one label, so their accuracy hides the others."""
    return scores.accuracy if task == "classify" else scores.macro_f1


def _warm_up_then_decay(steps: int, warm_up: float, step: int) -> float:
    return min((step + 1) / (warm_up * steps + 1), (steps - step) / steps)
