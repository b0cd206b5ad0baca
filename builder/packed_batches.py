"""Divides texts into packed batches without padding, in which texts of one length lie together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

PACK_TOKENS = 8192  # bounds memory; `most_texts` bounds what a step learns from
POOLED = 40  # batches cut from one sorted pool: their lengths nearly agree, and their order is still random


def packed_batches(
    lengths: np.ndarray, most_texts: int | None = None, rng: np.random.Generator | None = None, most_tokens: int = PACK_TOKENS
) -> Iterator[np.ndarray]:
    """Yields the indices of each batch, ordered by length. With `rng`, the batches come in a random order."""
    most_texts = most_texts or len(lengths)
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    mean = max(1.0, float(lengths.mean()))
    pool = len(order) if rng is None else POOLED * max(1, min(most_texts, int(most_tokens / mean)))
    for start in range(0, len(order), pool):
        cut = list(_cut(order[start : start + pool], lengths, most_tokens, most_texts))
        yield from cut if rng is None else (cut[i] for i in rng.permutation(len(cut)))


def _cut(order: np.ndarray, lengths: np.ndarray, most_tokens: int, most_texts: int) -> Iterator[np.ndarray]:
    order = order[np.argsort(lengths[order], kind="stable")]
    first = tokens = 0
    for i, length in enumerate(lengths[order]):
        if i > first and (tokens + length > most_tokens or i - first == most_texts):
            yield order[first:i]
            first, tokens = i, 0
        tokens += length
    yield order[first:]


def positions_of(lengths: np.ndarray) -> np.ndarray:
    """Returns the position of each token in its own text."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
