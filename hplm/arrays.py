"""The type of numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]  # of any shape and number type; comments say which


def together(arrays: Sequence[Array]) -> Array:
    """Returns arrays end to end. A single one is not copied."""
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def joined(arrays: Sequence[Array]) -> Array:
    """Returns what `together` does, faster, of arrays of one type that have no gaps in memory."""
    first = arrays[0]
    if len(arrays) == 1:
        return first
    whole = bytearray().join(arrays)  # pyright: ignore[reportArgumentType]: the stub does not know that arrays are buffers
    return np.frombuffer(whole, first.dtype).reshape(-1, *first.shape[1:])


def ranges(first: Array, counts: Array) -> Array:
    """Returns the numbers of ranges end to end, which begin with `first` and have so many numbers."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - counts), counts)


def padded(array: Array, size: int) -> Array:
    """Returns an array of this size: its last number again and again behind its own numbers."""
    whole = np.full(size, array[-1], array.dtype)
    whole[: len(array)] = array
    return whole
