"""The interface for linear maps over all rows of a batch at once, each row with the weights of its slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array
from hplm.model.layer import activation


class Map(NamedTuple):
    """A linear map of each slot: slots x outputs x inputs, and slots x outputs."""

    weight: Tensor
    bias: Tensor | None = None


class Groups(ABC):
    """Made once for a batch from the slot of every row, and used in every layer. Weights are slots x outputs x inputs."""

    is_recordable = False  # whether its kernels depend only on the sizes of what it has sent to the device

    @abstractmethod
    def __init__(self, slots: Array, device: torch.device, counts: Array | None = None) -> None:
        """`counts`: how many rows have each of the slots, at least one; None: one."""

    def spread(self, x: Tensor) -> Tensor:
        """Brings rows x d into the order and shape that the maps take."""
        return x

    def collect(self, spread: Tensor) -> Tensor:
        """Brings spread rows back into rows x d."""
        return spread

    @abstractmethod
    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Adds the linear map of spread rows to `base`, in place: large new tensors cost more than small products."""
        base.add_(self.collect(self.linear(spread, weight, bias)))

    def add_low_rank(self, base: Tensor, spread: Tensor, down: Map, up: Map, function: str | None = None) -> None:
        """Adds two linear maps of spread rows to `base`, in place, with a function between them."""
        inner = self.linear(spread, *down)
        self.add(base, inner if function is None else activation(function)(inner), *up)


def starts_of_runs(slots: Array) -> Array:
    """Returns the first row of each run of rows with one slot."""
    changes = np.empty(len(slots), dtype=bool)
    changes[:1] = True
    np.not_equal(slots[1:], slots[:-1], out=changes[1:])
    return changes.nonzero()[0]
