"""A checkpoint's states of the texts that a tenant learns from: computed once, and read in every epoch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from torch import Tensor

from builder.hardware import half_precision
from builder.tasks.lookup import Pack
from builder.training.data import Data
from hplm.model.tensors import sent

MOST_BYTES = 4 << 30  # 250,000 tokens take 3.1 GB after eight layers as wide as BERT-base, 0.8 after four of MiniLM


class Taught:
    """States of all tokens after each upper layer, in 16 bits, in a file without a name: it ends with the process.

    If it would take more than `most` bytes or half of the free disk, the states are computed again for each batch.
    """

    def __init__(self, states: Callable[[Pack], Sequence[Tensor]], data: Data, folder: Path, most: int = MOST_BYTES) -> None:
        self._states, self._data, self._kept = states, data, _room(data, folder, most)
        if self._kept is None:
            return
        for chosen, pack in data.packs(data.train, title="asking the checkpoint"):
            with torch.no_grad(), half_precision(data.device):
                found = torch.cat(list(states(pack)), dim=1).half().cpu()
            for i, own in zip(chosen, found.split(pack.lengths), strict=True):
                self._kept[i][:] = own.numpy()

    def of(self, chosen: np.ndarray, pack: Pack) -> Sequence[Tensor]:
        """Returns the states of a batch: `pack` has the texts with these numbers."""
        if self._kept is None:
            return self._states(pack)
        states = sent(np.concatenate([self._kept[i] for i in chosen]), self._data.device)
        return states.float().split(self._data.config.hidden, dim=1)


def _room(data: Data, folder: Path, most: int) -> list[np.ndarray] | None:
    """Returns where the states of each text are put; None if there is too little room."""
    tokens, width = int(data.train.lengths.sum()), data.config.upper_layers * data.config.hidden
    size = 2 * tokens * width
    if size > min(most, shutil.disk_usage(folder).free // 2):
        return None
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # without it, a full disk would end the process in a later write
        kept = np.memmap(file, np.float16, "r+", shape=(tokens, width))
    return np.split(np.asarray(kept), np.cumsum(data.train.lengths)[:-1])
