"""n-gram windows: which tokens the lower stack sees together, and how a window shrinks when it is not in a table.

A window holds a token in its centre and its neighbours; `ABSENT` stands where a text ends. Tokens are stored as id + 1, so that
0 is free to mean "no token" in any vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ABSENT = 0


def windows_of(tokens: np.ndarray, lengths: np.ndarray, n: int) -> np.ndarray:
    """The window of each token of texts that lie end to end: tokens x n, int64, as id + 1."""
    centre = n // 2
    ends = np.cumsum(lengths)
    starts = np.repeat(ends - lengths, lengths)
    stops = np.repeat(ends, lengths)
    at = np.arange(len(tokens))[:, None] + np.arange(-centre, n - centre)
    inside = (at >= starts[:, None]) & (at < stops[:, None])
    return np.where(inside, tokens.astype(np.int64)[np.clip(at, 0, max(len(tokens) - 1, 0))] + 1, ABSENT)


def fallbacks(n: int) -> np.ndarray:
    """Which positions each level of the fallback keeps, the whole window first: for 3, abc -> 0bc -> 0b0.

    The outermost token goes first, left before right, until the centre is alone.
    """
    keep = np.ones(n, dtype=bool)
    levels = [keep.copy()]
    for distance in range(n // 2, 0, -1):
        for position in (n // 2 - distance, n // 2 + distance):
            keep[position] = False
            levels.append(keep.copy())
    return np.stack(levels)


def aggregate(vectors: Tensor) -> Tensor:
    """Sum over the windows that cover a token: windows x n x d -> tokens x d.

    Token i stands at position j of the window of token i + centre - j. Positions beyond a text's end are absent there, and
    absent positions hold zeros, so a plain shift over the packed texts never mixes two of them.
    """
    tokens, n, _ = vectors.shape
    centre = n // 2
    total = vectors[:, centre]
    for position in range(n):
        shift = centre - position  # the window that holds token i at `position` is the one of token i + shift
        if shift == 0 or abs(shift) >= tokens:
            continue
        part = vectors[:, position]
        pad = part.new_zeros(abs(shift), part.shape[1])
        total = total + (torch.cat([part[shift:], pad]) if shift > 0 else torch.cat([pad, part[:shift]]))
    return total
