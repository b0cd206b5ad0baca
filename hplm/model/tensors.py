"""Tensors as arrays and arrays as tensors, with types, which torch's stubs leave open; and how many rows a product gets."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from hplm.arrays import Array

ALIGNMENT = 16  # bytes, of which the beginnings of a block's tensors are multiples
NUMBERS = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}  # that a block takes
LEAST_STEP = 16  # rows of a product, of which its number of rows is a multiple
_thread = threading.local()


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
    if isinstance(given, np.ndarray):
        block: Block | None = getattr(_thread, "block", None)
        if block is not None and block.device == device and (own := block.take(given)) is not None:
            return own
        given = tensor_of(given)
    if device.type == "cpu":
        return given
    here = given.device.type == "cpu"
    return (given.pin_memory() if device.type == "cuda" and here else given).to(device, non_blocking=True)


class Block:
    """The small arrays that a thread sends to a device while the block is open. When it closes, one copy brings all of them."""

    def __init__(self, device: torch.device, size: int) -> None:
        """`size`: in bytes. An array that does not fit is sent by itself."""
        self.device = device
        self.taken: list[int] = []  # the bytes of each array
        self.is_full = False  # whether an array did not fit
        self._here = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = array_of(self._here)
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self._typed = {own: self._there.view(other) for own, other in NUMBERS.items()}
        self._used = 0

    def take(self, array: Array) -> Tensor | None:
        """Returns the tensor that will have these numbers. None: they do not fit."""
        typed, start, end = self._typed.get(array.dtype), self._used, self._used + array.nbytes
        if typed is None or array.ndim != 1 or end > len(self._bytes):
            self.is_full = True
            return None
        self._bytes[start:end].view(array.dtype)[:] = array
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        self.taken.append(array.nbytes)
        return typed[start // array.itemsize : end // array.itemsize]

    @property
    def so_far(self) -> Tensor:
        """The bytes of the arrays that it has now, on the device."""
        return self._there[: self._used]

    def __enter__(self) -> Block:
        _thread.block = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.block = None
        self._there[: self._used].copy_(self._here[: self._used], non_blocking=True)


def rounded_up(rows: int) -> int:
    """Returns a multiple of 16, from 128 rows on at most an eighth more.

    oneDNN takes up to some milliseconds to prepare a product for a number of rows that is new.
    """
    step = max(LEAST_STEP, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step
