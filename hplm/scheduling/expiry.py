"""When waiting texts must start to compute, to be answered in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.backbones import Backbones
from hplm.scheduling.columns import NEVER, Columns
from hplm.scheduling.waiting import T


class Expiry(Generic[T]):
    """`predicts`, here: whether a text expires as soon as it can no longer be in time. If not, it expires at its deadline.

    Every request asks for the earliest time. So it is kept, and computed again only after texts have left or the prediction has
    changed: call `forget` then.
    """

    def __init__(self, columns: Columns[T], backbones: Backbones, answering_ns: int) -> None:
        self._columns = columns
        self._backbones = backbones
        self._answering_ns = answering_ns
        self._earliest: int | None = None  # None: not known any more
        self._predicted = False

    def forget(self) -> None:
        self._earliest = None

    def earliest(self, predicts: bool) -> int:
        """Returns when the first waiting text must start, or NEVER."""
        if self._earliest is None or self._predicted != predicts:
            self._earliest, self._predicted = int(self._last_starts(predicts).min(initial=NEVER)), predicts
        return self._earliest

    def joined(self, texts: Sequence[T]) -> None:
        """Takes texts into account that wait from now on, without arrays: most requests have one text."""
        if self._earliest is None:
            return
        starts = (text.deadline_ns - int(self._predicted and self._needed_ns(text)) for text in texts if text.deadline_ns)
        self._earliest = min(self._earliest, min(starts, default=NEVER))

    def late(self, start_ns: int, predicts: bool) -> Array:
        """Returns the indexes of the texts that had to start by this time."""
        return np.flatnonzero(self._last_starts(predicts) <= start_ns)

    def _last_starts(self, predicts: bool) -> Array:
        """Returns for each waiting text when it must start, in a batch of its own."""
        deadline = self._columns.deadline
        if not predicts:
            return deadline
        needed_ns = self._backbones.alone_ns(self._columns, self._answering_ns).astype(np.int64)
        return np.where(deadline == NEVER, NEVER, deadline - needed_ns)

    def _needed_ns(self, text: T) -> float:
        """Returns the time from the start of a batch of one text until its client has the answer."""
        return self._backbones.needed_ns(text.backbone, text.tokens, self._answering_ns)
