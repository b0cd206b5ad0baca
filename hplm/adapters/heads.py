"""Rounds heads up to a few sizes, so that heads of different tenants can be applied together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hplm.errors import InvalidInput

SIZES = (16, 64, 256, 1024, 4096)  # labels


def size_for(labels: int) -> int:
    for size in SIZES:
        if labels <= size:
            return size
    raise InvalidInput(f"{labels} labels are too many: a head has {SIZES[-1]} at most")


def sized(head: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Returns the head with `size` rows: its first ones, and zeros behind them. Rows beyond a tenant's labels are not read."""
    found = dict(head)
    for name in ("weight", "bias"):
        own = head[name][:size]
        found[name] = torch.cat([own, own.new_zeros(size - len(own), *own.shape[1:])])
    return found
