"""Tensors as arrays and arrays as tensors, with types: torch's stubs leave those of `numpy` and `from_numpy` open."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array


def array_of(tensor: Tensor) -> Array:
    """Returns the numbers of a tensor in host memory, without a copy."""
    return tensor.numpy()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]: the stub's ndarray is bare


def tensor_of(array: Array) -> Tensor:
    """Returns an array as a tensor in host memory, without a copy."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]: the stub's parameter has no type


def sent(given: Array | Tensor, device: torch.device) -> Tensor:
    """Returns numbers on the device. For CUDA the copy is only started, in the calling thread's stream.

    From ordinary memory, `to` would make the thread wait for the copy. Torch keeps the pinned memory until the copy is done.
    """
    tensor = tensor_of(given) if isinstance(given, np.ndarray) else given
    if device.type == "cpu":
        return tensor
    here = tensor.device.type == "cpu"
    return (tensor.pin_memory() if device.type == "cuda" and here else tensor).to(device, non_blocking=True)
