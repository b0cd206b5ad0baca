"""Models how long a batch takes in each packing, where padded tokens and scores count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.filling import first_fit
from hplm.scheduling.selection import OUTSIDE, Places
from hplm.simulate.encoders import BatchTime


@dataclass(frozen=True)
class EngineCost:
    """Costs in nanoseconds. By default a batch of 1,280 tokens takes 30 ms, and scores cost as much as in BERT-base."""

    batch: float = 3e6
    token: float = 27e6 / 1280
    score: float = 27e6 / 1280 * 2.2e-4
    row_tokens: int = 128  # length of a row in `concat`, unless the policy has filled the rows
    slot_tokens: int = 0  # length of a slot in `slotted`, unless the policy has filled the slots; 0: as the longest text

    def of(self, packing: str) -> BatchTime:
        return getattr(self, packing)

    def packed(self, lengths: Array, places: Places | None = None) -> float:
        return self._computes(lengths.sum(), (lengths**2).sum())

    def naive(self, lengths: Array, places: Places | None = None) -> float:
        longest = lengths.max()
        return self._computes(len(lengths) * longest, len(lengths) * longest**2)

    def turbo(self, lengths: Array, places: Places | None = None) -> float:
        """Splits the sorted texts into padded batches at the lowest cost, as TurboTransformers does. Returns that cost."""
        ordered = np.sort(lengths)
        best = np.zeros(len(ordered) + 1)
        for end in range(1, len(ordered) + 1):
            longest, counts = ordered[end - 1], np.arange(end, 0, -1)
            best[end] = (best[:end] + self.batch + counts * longest * (self.token + self.score * longest)).min()
        return float(best[-1])

    def concat(self, lengths: Array, places: Places | None = None) -> float:
        return self._boxed(lengths, self.row_tokens, None if places is None else places.row)

    def slotted(self, lengths: Array, places: Places | None = None) -> float:
        return self._boxed(lengths, self.slot_tokens or int(lengths.max()), None if places is None else places.slot)

    def _boxed(self, lengths: Array, size: int, box: Array | None) -> float:
        """Returns the cost of texts in boxes of equal width. Texts outside have no padding."""
        if box is None:
            lengths = -np.sort(-lengths)
            box = first_fit(lengths, size, len(lengths))
        outside = lengths[box == OUTSIDE]
        _, of = np.unique(box[box != OUTSIDE], return_inverse=True)
        filled = np.bincount(of, lengths[box != OUTSIDE]).astype(np.int64)
        width = filled.max(initial=0)
        return self._computes(len(filled) * width + outside.sum(), len(filled) * width**2 + (outside**2).sum())

    def _computes(self, tokens: int, scores: int) -> float:
        return float(self.batch + self.token * tokens + self.score * scores)


PACKINGS = ("naive", "turbo", "concat", "slotted", "packed")
