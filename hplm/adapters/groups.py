"""Which slot applies to which rows of a batch, and linear maps over all of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Groups(ABC):
    """Built once a batch from the slot of every row; used in every layer. Weights are slots x outputs x inputs."""

    @abstractmethod
    def spread(self, x: Tensor) -> Tensor:
        """rows x d -> the order and shape in which the maps take them."""

    @abstractmethod
    def collect(self, spread: Tensor) -> Tensor:
        """And back."""

    @abstractmethod
    def linear(self, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def add(self, base: Tensor, spread: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Adds to rows, in place, what a linear map makes of spread ones: large new tensors cost more than small products."""
