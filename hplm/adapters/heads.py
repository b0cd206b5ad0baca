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


def grown(head: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Returns the head with `size` rows. Rows beyond the tenant's labels are zero and never read."""
    whole = dict(head)
    for name in ("weight", "bias"):
        whole[name] = torch.zeros(size, *head[name].shape[1:])
        whole[name][: len(head[name])] = head[name]
    return whole


def shrunk(head: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Returns the head with its first `size` rows: those that `grown` was given."""
    return {name: tensor[:size].clone() if name in ("weight", "bias") else tensor for name, tensor in head.items()}
