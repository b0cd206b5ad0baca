"""The backbones that share a line: what is known of the batches of each, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.batch import Batch
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import FIRST, CostModel

LEARNING = 0.1  # rate of running means
LEAD_NS = 100_000_000  # of the engine's time that a backbone may have beyond that of another one with waiting texts


class Learned:
    """The times of one backbone's batches, learned from those that have run."""

    def __init__(self) -> None:
        self.used_ns = 0.0  # of the engine's time, by batches that do not run any more
        self.cost = CostModel()
        self.loaded = 0.0  # mean number of adapters copied to the device for each slot key of a batch

    def expected_ns(self, tokens: int, texts: int, slot_keys: int) -> float:
        """Returns how long a batch will take."""
        return float(self.cost.predict(tokens, texts, slot_keys * self.loaded))

    def finished(self, batch: Batch[Any], adapters: int, took_ns: int, stages_ns: Sequence[int]) -> None:
        """Learns from a batch, for which `adapters` adapters had to be loaded."""
        self.used_ns += took_ns
        self.loaded += LEARNING * (adapters / batch.slot_keys - self.loaded)
        self.cost.observe(batch.tokens, len(batch.texts), adapters, took_ns, stages_ns)


class Backbones:
    """They take turns. The backbone with the highest waiting priority is next. Among equals, that priority's earliest deadline
    decides, and among texts without one the oldest text.

    A backbone that has used the engine for clearly longer than others lets these go first. So none waits for ever, whatever the
    priorities and deadlines of the others are. Running batches count with the time that is expected of them, finished ones with
    the time that they took. Time in which a backbone had no waiting text gives it no right to catch up, but for the
    batches that run when its next text comes.
    """

    def __init__(self, count: int) -> None:
        self._learned = [Learned() for _ in range(count)]

    def __getitem__(self, backbone: int) -> Learned:
        return self._learned[backbone]

    @property
    def costs(self) -> Sequence[CostModel]:
        return [learned.cost for learned in self._learned]

    @property
    def shares(self) -> list[list[float]]:
        """The mean shares of a batch's time that the stages take, of each backbone.

        One that no batch was computed of counts as if it kept only the first stage busy.
        """
        if len(self._learned) == 1:
            return [self._learned[0].cost.shares]
        stages = max(len(learned.cost.shares) for learned in self._learned)
        return [[*own, *[0.0] * (stages - len(own))] for own in (learned.cost.shares for learned in self._learned)]

    def in_turn(self, columns: Columns, running: Iterable[Batch[Any]]) -> Iterator[tuple[int, Columns, Array | None]]:
        """Yields the backbones with waiting texts, the next one first, their texts, and the indexes of these.

        None instead of indexes: all texts are of this backbone.
        """
        if len(self._learned) == 1:
            yield 0, columns, None
            return
        waiting: list[int] = np.unique(columns.backbones[columns.counts > 0]).tolist()
        used_ns = [learned.used_ns for learned in self._learned]
        for batch in running:
            used_ns[batch.backbone] += batch.expected_ns
        least_ns = min(used_ns[backbone] for backbone in waiting)
        # Running batches may take less than expected: what they raised would stay.
        settled_ns = min(self._learned[backbone].used_ns for backbone in waiting)
        for backbone in set(range(len(self._learned))) - set(waiting):
            self._learned[backbone].used_ns += max(0, settled_ns - used_ns[backbone])
        if len(waiting) == 1:
            yield waiting[0], columns, None
            return
        of = columns.backbone
        indexes = {backbone: np.flatnonzero(of == backbone) for backbone in waiting}

        def turn(backbone: int) -> tuple[bool, int, int, int]:
            own = indexes[backbone]
            is_ahead = used_ns[backbone] > least_ns + LEAD_NS
            highest = int(columns.priority[own].max())
            own = own[columns.priority[own] == highest]
            return is_ahead, -highest, int(columns.deadline[own].min()), int(columns.arrival[own].min())

        for backbone in sorted(waiting, key=turn):
            yield backbone, columns.only(backbone, indexes[backbone]), indexes[backbone]

    @overload
    def needed_ns(self, backbone: int, tokens: Array, around_ns: int) -> Array: ...
    @overload
    def needed_ns(self, backbone: int, tokens: int, around_ns: int) -> float: ...
    def needed_ns(self, backbone: int, tokens: Array | int, around_ns: int) -> Array | float:
        """Returns the time of texts in batches of their own, with a time around. It is 0 as long as little is known."""
        learned = self._learned[backbone]
        known = learned.cost.observed >= FIRST
        return around_ns + learned.cost.predict(tokens, 1, learned.loaded) if known else 0 * tokens

    def alone_ns(self, columns: Columns, around_ns: int) -> Array:
        """Returns the same for each waiting text."""
        if len(self._learned) == 1:
            return self.needed_ns(0, columns.tokens, around_ns)
        found, of = np.zeros(len(columns)), columns.backbone
        for backbone in range(len(self._learned)):
            own = of == backbone
            found[own] = self.needed_ns(backbone, columns.tokens[own], around_ns)
        return found
