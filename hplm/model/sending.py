"""Sends tensors from host memory to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. For CUDA the copy is only started, in the calling thread's stream.

    From ordinary memory, `to` would make the thread wait for the copy. Torch keeps the pinned memory until the copy is done.
    """
    kind = device.type
    if kind == "cpu":
        return tensor
    return (tensor.pin_memory() if kind == "cuda" else tensor).to(device, non_blocking=True)
