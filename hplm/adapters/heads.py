"""Heads come in a few sizes, so that those of different tenants are applied together."""

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
    raise InvalidInput(f"{labels} labels: heads go up to {SIZES[-1]}")


def grown(head: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Rows beyond the tenant's labels are zero and never read."""
    whole = dict(head)
    for name in ("weight", "bias"):
        whole[name] = torch.zeros(size, *head[name].shape[1:])
        whole[name][: len(head[name])] = head[name]
    return whole
