"""What the exits of a tenant see of texts: hidden states between the upper layers, computed once, beside the full answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from builder.learning.bodies import PlotBody
from builder.training.data import Data
from builder.training.model import TenantModel
from hplm.arrays import Array
from hplm.model.means import with_means
from hplm.model.tensors import array_of

MOST_ROWS = 60_000  # that exits learn from: a text of `tag` has many


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
