"""Lengths of texts as in TCB 6.1: normal, mean 20, variance 20 or 100, clipped to 3 ... 100."""

from __future__ import annotations

import numpy as np

from hplm.engine.packing import Packing

BATCHES = 4  # different batches, run in turn
MEAN, VARIANCES, CLIP = 20, (20, 100), (3, 100)


def batches_of(texts: int, variance: int) -> list[np.ndarray]:
    generator = np.random.default_rng(variance)
    return [lengths_of(texts, variance, generator) for _ in range(BATCHES)]


def lengths_of(texts: int, variance: int, generator: np.random.Generator) -> np.ndarray:
    return generator.normal(MEAN, variance**0.5, texts).round().clip(*CLIP).astype(np.int64)


def filling(tokens: int, variance: int) -> np.ndarray:
    """Returns the lengths of as many texts as fit into this number of tokens."""
    lengths = lengths_of(tokens // CLIP[0], variance, np.random.default_rng(variance))
    return lengths[np.cumsum(lengths) <= tokens]


def padding(packing: Packing, batches: list[np.ndarray]) -> float:
    """Returns the share of the computed rows that belong to no text."""
    rows = sum(arrangement.rows for lengths in batches for arrangement in packing.arrange(lengths))
    return 1 - sum(int(lengths.sum()) for lengths in batches) / rows
