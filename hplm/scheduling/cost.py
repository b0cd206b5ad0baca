"""Learns from finished batches how long a batch takes, by its tokens, texts and adapters to load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from hplm.arrays import Array

TERMS: tuple[str, ...] = ("batch", "token", "text", "adapter")
# Assumed nanoseconds for a batch, a token, a text and an adapter, before anything has run. Observed batches give the scale.
# If they are all alike, these proportions remain.
SHAPE = np.array([1e6, 20e3, 10e3, 100e3])
FORGETTING = 0.99  # per batch: the last 70 batches have half of the weight
BELIEF = 0.01  # weight of SHAPE: a hundredth of one batch
OUTLIER = 3.0  # mean deviations; a batch that is further off counts as if it were only so far off
FIRST = 8  # batches before predictions are used: a process starts slowly
LEARNING = 0.05  # rate of the running mean of the deviation
SETTLED, SELDOM = 64, 8  # after so many batches, the terms are computed again only after each so many
LEARNING_STAGES = 0.1  # rate of the running means of the stages' shares, after the first batches

Numbers = Array | float


class Cost:
    """The part of the cost model that policies use: the terms of an engine's time."""

    def __init__(self, terms: Array) -> None:
        self.terms = terms
        self.shares: list[float] = [1.0]  # mean shares of a batch's time that its stages take

    @property
    def slowest(self) -> float:
        """The share of a batch's time that its slowest stage takes: so often a batch can be done. 1 for a single stage."""
        return max(self.shares)

    @overload
    def predict(self, tokens: Array, texts: Numbers = 1, adapters: Numbers = 0) -> Array: ...
    @overload
    def predict(self, tokens: float, texts: float = 1, adapters: float = 0) -> float: ...
    def predict(self, tokens: Numbers, texts: Numbers = 1, adapters: Numbers = 0) -> Numbers:
        """Returns the nanoseconds that a batch takes, in all stages together."""
        batch, token, text, adapter = self.terms.tolist()
        return batch + token * tokens + text * texts + adapter * adapters


class CostModel(Cost):
    """Weighted least squares with forgetting and without negative terms. Errors count relative to the batch's time."""

    def __init__(self) -> None:
        super().__init__(SHAPE.copy())
        self.deviation = 0.1  # mean, relative
        self.observed = 0
        self._moments = np.zeros((5, 5))  # of the terms' numbers for each nanosecond of a batch, and of 1

    def by_batch(self) -> Cost:
        """Returns the costs by which one batch follows another: those of the slowest stage."""
        return self if len(self.shares) == 1 else Cost(self.terms * self.slowest)

    def tokens_within(self, ns: float, mean: float, adapters: float = 0.0) -> int:
        """Returns how many tokens take so long, in texts of a mean length that load so many adapters each.

        What a batch takes whatever is in it is not counted: smaller batches would only pay for it more often.
        """
        _, token, text, adapter = self.terms.tolist()
        return int(ns / max(token + (text + adapter * adapters) / mean, 1e-9))

    def observe(self, tokens: int, texts: int, adapters: int, took_ns: int, stages_ns: Sequence[int] = ()) -> None:
        """`stages_ns`: the time of each stage, if several have computed it. A batch that took no time teaches nothing."""
        if took_ns <= 0:
            return
        if len(stages_ns) > 1:
            shares = [own / sum(stages_ns) for own in stages_ns]
            before = self.shares if len(self.shares) == len(shares) else shares
            rate = max(LEARNING_STAGES, 1 / (1 + self.observed))
            self.shares = [old + rate * (new - old) for old, new in zip(before, shares, strict=True)]
        expected = self.predict(tokens, texts, adapters)
        error = abs(took_ns - expected) / (expected or took_ns)  # the adapters may be all that is left of the terms
        weight = 1.0
        if self.observed >= 8:  # the first batches of a process are slow and must not set the deviation
            weight = min(1.0, OUTLIER * self.deviation / max(error, 1e-9))
            # Outliers move the deviation too. So after some batches the model follows a machine that has become slower.
            self.deviation += LEARNING * (min(error, 2 * OUTLIER * self.deviation) - self.deviation)
            self.deviation = max(self.deviation, 1e-3)
        self.observed += 1
        forget = min(FORGETTING, 1 - 1 / (1 + self.observed))
        own = np.array([1 / took_ns, tokens / took_ns, texts / took_ns, adapters / took_ns, 1.0])
        self._moments *= forget
        self._moments += own[:, None] * (weight * own)
        if self.observed < SETTLED or self.observed % SELDOM == 0:
            self._solve()

    def _solve(self) -> None:
        products: Array = self._moments[:4, 4]
        shape = SHAPE * (self._moments[4, 4] / products.dot(SHAPE))
        squares: Array = self._moments[:4, :4] + np.diag(BELIEF / shape**2)
        products = products + BELIEF / shape
        terms, kept = np.linalg.solve(squares, products), np.arange(4)
        while min(terms.tolist()) < 0:  # negative terms are dropped; at least one term remains
            kept = kept[terms > 0]
            terms = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
        self.terms = np.zeros(4)
        self.terms[kept] = terms
