"""Computes what a level answers to labelled texts as it is served, how much attention their tokens get, and pruned texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from builder.cascade.levels import OpenLevel
from builder.evaluation.tenant import ServedBody
from builder.packed_batches import packed_batches
from builder.training.examples import Pack, Reader, Texts
from builder.training.finetuning import PACK_TOKENS
from builder.training.model import TenantModel
from hplm.engine.engine import Precision
from hplm.model.importance import Received
from hplm.model.layer import Attend


@dataclass(frozen=True)
class Computed:
    """The logits of a level, and the attention in it, window by window."""

    logits: list[np.ndarray]  # rows x classes, fp32
    received: list[np.ndarray]  # the attention of each token, fp32; empty where it was not asked for


class WatchingBody(ServedBody):
    """Also adds up the attention that tokens receive."""

    received: Received

    def attention(self, pack: Pack, device: torch.device) -> Attend:
        self.received = Received(super().attention(pack, device), pack.lengths, self._heads)
        return self.received


@torch.inference_mode()
def computed(
    level: OpenLevel,
    reader: Reader,
    texts: Texts,
    precision: Precision,
    device: torch.device,
    watch: bool = False,
    stay: Sequence[np.ndarray] | None = None,
) -> Computed:
    """Computes all windows of the texts. `stay`: the tokens of each window that the level reads; None: all."""
    kind = WatchingBody if watch else ServedBody
    upper = level.open()
    body = kind(upper, upper.config.heads, precision).to(device)
    model = TenantModel(level.adapter, level.head, seed=0)
    model.load(*level.weights)
    model.to(device)
    logits: list[np.ndarray] = [np.empty(0)] * len(texts.texts)
    received = list(logits)
    for some in packed_batches(texts.lengths, PACK_TOKENS, len(logits)):
        pack = reader.pack(texts, some, device)
        if stay is not None:
            pack = pruned(pack, np.concatenate([stay[i] for i in some]))
        for i, own in zip(some, _parts(model(body, pack), pack.rows_of), strict=True):
            logits[i] = own
        if isinstance(body, WatchingBody) and body.received.total is not None:
            for i, own in zip(some, _parts(body.received.total, pack.lengths), strict=True):
                received[i] = own
    return Computed(logits, received)


def pruned(pack: Pack, stay: np.ndarray) -> Pack:
    """Returns the pack without the other tokens. The sums of the rest stay as they were, and so do their positions.

    Every token that is read must stay, as a special one does.
    """
    kept = torch.from_numpy(np.flatnonzero(stay)).to(pack.tokens.device)
    after = torch.from_numpy(np.cumsum(stay) - 1).to(pack.tokens.device)
    ends = np.concatenate([[0], np.cumsum(pack.lengths)])
    assert pack.sums is not None  # `Reader.pack` makes them
    return replace(
        pack,
        sums=pack.sums[kept],
        tokens=pack.tokens[kept],
        positions=pack.positions[kept],
        segments=pack.segments[kept],
        lengths=[int(stay[start:stop].sum()) for start, stop in pairwise(ends)],
        reading=after[pack.reading],
    )


def _parts(numbers: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(numbers.float().cpu().numpy(), np.cumsum(lengths)[:-1])
