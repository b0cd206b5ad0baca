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
States = Callable[[Pack], Sequence[Tensor]]  # of all tokens, after each upper layer


def taught(states: States, data: Data, folder: Path, most: int = MOST_BYTES) -> Callable[[np.ndarray, Pack], Sequence[Tensor]]:
    """Returns a function from a batch, the numbers of its texts and their pack, to its states.

    They are kept in 16 bits, in a file without a name: it ends with the process. If it would take more than `most` bytes or
    half of the free disk, the states are computed again for each batch.
    """
    tokens, width = int(data.train.lengths.sum()), data.config.upper_layers * data.config.hidden
    if (size := 2 * tokens * width) > min(most, shutil.disk_usage(folder).free // 2):
        return lambda _, pack: states(pack)
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # without it, a full disk would end the process in a later write
        room = np.asarray(np.memmap(file, np.float16, "r+", shape=(tokens, width)))
    kept = np.split(room, np.cumsum(data.train.lengths)[:-1])
    for chosen, pack in data.packs(data.train, title="asking the checkpoint"):
        with torch.no_grad(), half_precision(data.device):
            found = torch.cat(list(states(pack)), dim=1).half().cpu()
        for i, own in zip(chosen, found.split(pack.lengths), strict=True):
            kept[i][:] = own.numpy()

    def read(chosen: np.ndarray, _: Pack) -> Sequence[Tensor]:
        return sent(np.concatenate([kept[i] for i in chosen]), data.device).float().split(data.config.hidden, dim=1)

    return read
