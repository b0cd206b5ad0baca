"""The heads of a tenant's exits: each learns to answer as the full stack does, from what it sees of the same texts.

What exits see are hidden states between the upper layers, computed once, beside the full answers.

Their texts need no labels. On texts that it has learned, the full stack is surer than on others; so the exits' calibrations are
fitted to other texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from builder.learning.bodies import PlotBody
from builder.learning.limits import Epochs
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.progress import Exam
from builder.tasks.tasks import TrainingTask
from builder.training.data import Data
from builder.training.model import TenantModel, Weights, rounded, slot, tiles
from hplm.adapters.layout import Layout
from hplm.adapters.layout_rows import with_means
from hplm.arrays import Array
from hplm.model.tensors import array_of

MOST_ROWS = 60_000  # that exits learn from: a text of `tag` has many
BATCH_ROWS = 128
EPOCHS = 30  # at most
PATIENCE = 4  # epochs in which no exit gets better at texts that were put aside
ASIDE = 0.1  # share of the texts
RATE, WARM_UP, DECAY = 2e-3, 50, 0.05  # warming up takes so many steps
WAY_OUT = "Its texts may be too few, or all alike: give other ones"

LEAST = 0.05  # of the mean spread: numbers that vary less count less, or their weights would be too large for 16 bits
TINY = 1e-6


@dataclass(frozen=True)
class States:
    """Rows that a head reads, text after text."""

    exits: list[Tensor]  # of each exit: rows x 2 hidden, the token and the mean of its text's tokens, fp16
    logits: Tensor  # the full stack's: rows x labels
    rows_of: list[int]  # rows of each text
    spans: list[Array]  # of each text
    lengths: Array  # tokens of each text

    def of_texts(self, values: Tensor) -> list[Array]:
        """Returns the rows of each text."""
        return np.split(values.numpy(), np.cumsum(self.rows_of)[:-1])


@torch.inference_mode()
def states_of(body: PlotBody, model: TenantModel, data: Data, most_rows: int | None = None) -> States:
    """Computes the states of the texts; with `most_rows`, of the first texts that have so many rows."""
    texts = data.dev
    counts = np.array([len(text.spans) for text in texts.texts])
    if most_rows is not None:
        used = max(1, int(np.searchsorted(np.cumsum(counts), most_rows, side="right")))
        texts, counts = texts.first(used), counts[:used]
    starts = np.cumsum(counts) - counts
    rows, width = int(counts.sum()), data.config.hidden
    exits = [torch.empty(rows, 2 * width, dtype=torch.float16) for _ in body.upper_layers]
    logits = torch.empty(rows, len(data.labels))
    for some, pack in data.packs(texts, title="computing what exits see"):
        here = torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in some]))
        *entering, last = model.states(body, pack)
        reading, rows_of, lengths = array_of(pack.reading.cpu()), np.array(pack.rows_of), np.array(pack.lengths)
        seen = [with_means(x, reading, rows_of, np.cumsum(lengths) - lengths, lengths) for x in entering]
        for kept, own in zip((*exits, logits), (*seen, model.read(last[pack.reading].float())), strict=True):
            kept[here] = own.to(kept)
    return States(exits, logits, counts.tolist(), [text.spans for text in texts.texts], texts.lengths)


class ExitHead(nn.Module):
    """The head of an exit. It reads rows whose numbers are brought to a common scale; storing takes that into the weights."""

    def __init__(self, layout: Layout, seen: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self._layout, spread = layout, seen.std(dim=0)
        self._mean, self._scale = seen.mean(dim=0), 1 / spread.clamp(min=LEAST * float(spread.mean()) + TINY)
        self.weights = slot(layout, generator, None)

    def forward(self, seen: Tensor) -> Tensor:
        return self._layout.read((seen - self._mean) * self._scale, tiles(seen), dict(self.weights.items()))

    def stored(self) -> Weights:
        """Returns weights for rows as they are, as records store them."""
        weights = {name: weight.detach()[0] for name, weight in self.weights.items()}
        dense = weights["dense"] * self._scale
        found = {**weights, "dense": dense, "dense_bias": weights["dense_bias"] - dense @ self._mean}
        return rounded(found, self._layout, "an exit diverged", WAY_OUT)


def learned(states: States, layout: Layout, task: TrainingTask, seed: int = 0, folder: Path | None = None) -> list[Weights]:
    """Returns the weights of each exit's head. `folder`: of savepoints, from which the same call goes on."""
    assert task.distance is not None  # as the caller has checked
    distance, aside = task.distance, max(1, round(ASIDE * len(states.rows_of)))
    first = sum(states.rows_of[:-aside])  # rows, by which heads learn; the others score them
    chance = torch.Generator().manual_seed(seed)
    batches = [torch.randperm(first, generator=chance).split(BATCH_ROWS) for _ in range(EPOCHS)]
    epochs = Epochs(batches, PATIENCE, warm_up=min(1.0, WARM_UP / (EPOCHS * len(batches[0]))))

    def learn(number: int, seen: Tensor) -> Weights:
        head = ExitHead(layout, seen[:first].float(), torch.Generator().manual_seed((seed + number) % 2**64))

        def loss_of(rows: Tensor) -> tuple[Tensor, int]:
            return distance(head(seen[rows].float()), states.logits[rows]), len(rows)

        @torch.inference_mode()
        def examined() -> Exam:
            loss = float(distance(head(seen[first:].float()), states.logits[first:]))
            return Exam(-loss, loss)

        training = Training(
            f"exit {number + 1} of {len(states.exits)}", seen.device, [ParameterGroup(RATE, dict(head.named_parameters()))],
            epochs.starting, loss_of, examined, WAY_OUT, start_counts=False, decay=DECAY, betas=(0.9, 0.999),
        )  # fmt: skip
        train(training, epochs, folder / f"exit-{number}.pt" if folder is not None else None)
        return head.stored()

    return [learn(*own) for own in enumerate(states.exits)]


@torch.inference_mode()
def outputs_of(weights: Weights, layout: Layout, seen: Tensor) -> Tensor:
    """Returns what a stored head says of rows: what the engine computes."""
    return layout.read(seen.float(), tiles(seen), {name: weight.float()[None] for name, weight in weights.items()})
