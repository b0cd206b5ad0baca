"""Tokens, each with the mean of its text's tokens: what an exit reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hplm.arrays import Array, ranges
from hplm.model.tensors import sent


def with_means(x: Tensor, reading: Array, rows_of: Array, starts: Array, lengths: Array) -> Tensor:
    """Returns rows x (2 * width), in 32 bits.

    `reading`: the token of each row. `rows_of`: the rows of each text. `starts` and `lengths`: where the texts' tokens are.
    """
    read, every, first = (sent(own, x.device) for own in (reading, ranges(starts, lengths), np.cumsum(lengths) - lengths))
    # As a table whose rows are summed, tokens take a tenth of the time of `segment_reduce` on a CPU.
    means = embedding_bag(every, x.float(), first, mode="mean")
    if len(reading) > len(lengths):
        means = means.index_select(0, sent(np.repeat(np.arange(len(lengths)), rows_of), x.device))
    return torch.cat((x.index_select(0, read).float(), means), dim=1)
