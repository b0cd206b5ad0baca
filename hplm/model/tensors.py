"""Tensors as arrays and arrays as tensors, with types: torch's stubs leave those of `numpy` and `from_numpy` open."""

from __future__ import annotations

import torch
from torch import Tensor

from hplm.arrays import Array


def array_of(tensor: Tensor) -> Array:
    """Returns the numbers of a tensor in host memory, without a copy."""
    return tensor.numpy()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]: the stub's ndarray is bare


def tensor_of(array: Array) -> Tensor:
    """Returns an array as a tensor in host memory, without a copy."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]: the stub's parameter has no type
