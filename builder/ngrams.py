"""Which n-grams of a corpus get an entry of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hplm.errors import InvalidInput
from hplm.model.windows import fallbacks, windows_of
from hplm.plot.keys import KeySpace

CHUNK_TOKENS = 1 << 21  # windows are reduced to distinct keys this many tokens at a time


@dataclass(frozen=True)
class Counts:
    """Distinct keys of windows and of their shorter forms, sorted, with how often each occurs."""

    keys: np.ndarray  # uint64
    counts: np.ndarray  # int64
    tokens: int

    def most_frequent(self, keep: float) -> np.ndarray:
        """Keys of the most frequent share `keep`; ties go to the smaller key. Sorted."""
        if not 0.0 <= keep <= 1.0:
            raise InvalidInput(f"keep {keep}: a share between 0 and 1")
        return np.sort(self.keys[np.argsort(-self.counts, kind="stable")[: round(keep * len(self.keys))]])


def count(documents: Iterable[np.ndarray], space: KeySpace) -> Counts:
    """Counts windows and their fallback forms over documents of token ids."""
    masks = [space.mask(keep) for keep in fallbacks(space.n)]
    merged = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
    chunk: list[np.ndarray] = []
    tokens = pending = 0

    def merge() -> tuple[np.ndarray, np.ndarray]:
        lengths = np.array([len(document) for document in chunk])
        whole = space.pack(windows_of(np.concatenate(chunk), lengths, space.n))
        new = np.unique(np.concatenate([whole & mask for mask in masks]), return_counts=True)
        keys, inverse = np.unique(np.concatenate([merged[0], new[0]]), return_inverse=True)
        counts = np.bincount(inverse, weights=np.concatenate([merged[1], new[1]])).astype(np.int64)
        return keys, counts

    for document in documents:
        chunk.append(document)
        pending += len(document)
        if pending >= CHUNK_TOKENS:
            merged, tokens, pending = merge(), tokens + pending, 0
            chunk.clear()
    if chunk:
        merged, tokens = merge(), tokens + pending
    return Counts(*merged, tokens)
