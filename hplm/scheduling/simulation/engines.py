"""Models how long a simulated engine takes for a batch, by its packing: padded tokens and attention scores count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array


@dataclass(frozen=True)
class EngineCost:
    """Costs in nanoseconds. By default a batch of 1,280 tokens takes 30 ms, and scores cost as much as in BERT-base."""

    batch: float = 3e6
    token: float = 27e6 / 1280
    score: float = 27e6 / 1280 * 2.2e-4
    row_tokens: int = 128  # length of a row in `concat`

    def of(self, packing: str) -> Callable[[Array], float]:
        return getattr(self, packing)

    def packed(self, lengths: Array) -> float:
        return self._computes(lengths.sum(), (lengths**2).sum())

    def naive(self, lengths: Array) -> float:
        longest = lengths.max()
        return self._computes(len(lengths) * longest, len(lengths) * longest**2)

    def turbo(self, lengths: Array) -> float:
        """Splits the sorted texts into padded batches at the lowest cost, as TurboTransformers does. Returns that cost."""
        ordered = np.sort(lengths)
        best = np.zeros(len(ordered) + 1)
        for end in range(1, len(ordered) + 1):
            longest, counts = ordered[end - 1], np.arange(end, 0, -1)
            best[end] = (best[:end] + self.batch + counts * longest * (self.token + self.score * longest)).min()
        return float(best[-1])

    def concat(self, lengths: Array) -> float:
        row = max(self.row_tokens, int(lengths.max()))
        rows = _first_fit(lengths, row)
        return self._computes(rows * row, rows * row**2)

    def slotted(self, lengths: Array) -> float:
        slot = int(lengths.max())
        slots = _first_fit(lengths, slot)
        return self._computes(slots * slot, slots * slot**2)

    def _computes(self, tokens: int, scores: int) -> float:
        return float(self.batch + self.token * tokens + self.score * scores)


PACKINGS = ("naive", "turbo", "concat", "slotted", "packed")


def _first_fit(lengths: Array, room: int) -> int:
    """Returns how many rows a first-fit packing takes."""
    left: list[int] = []
    for length in lengths.tolist():
        for i, free in enumerate(left):
            if length <= free:
                left[i] -= length
                break
        else:
            left.append(room - length)
    return len(left)
