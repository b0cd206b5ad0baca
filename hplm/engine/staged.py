"""A staged batch: all that the engine needs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hplm.adapters.copying import Mark
from hplm.adapters.layout import Layout
from hplm.adapters.slots import Slots
from hplm.engine.request import Text
from hplm.engine.sheets import Sheet
from hplm.plot.forest import Forest


@dataclass
class StagedBatch:
    texts: list[Text]
    forest: Forest
    sheets: list[Sheet]
    arrived: dict[Layout, list[Mark]]  # the marks of its sheets' parts; empty until copying starts
    held: list[tuple[Slots, int]]
    brought: int = 0  # adapters and heads that had to be copied
    ready: Mark = field(init=False)  # after it all tensors of the sheets are on the device
    number: int = 0  # of the batch, once it has started
    started_ns: int = 0
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)  # start and end of each step, in nanoseconds
    gone: set[int] = field(default_factory=set[int])  # the indexes of texts that are answered, or soon will be
    computing_ns: list[int] = field(default_factory=list)  # how long each stage of the engine has computed it

    @property
    def left(self) -> list[Text]:
        """The texts that are still to be answered."""
        return [text for index, text in enumerate(self.texts) if index not in self.gone]

    @property
    def tokens(self) -> int:
        return sum(int(sheet.lengths.sum()) for sheet in self.sheets)

    def timed(self, stage: str) -> Timed:
        return Timed(self, stage)


class Timed:
    """Notes when a step of a batch starts and ends, unless it fails."""

    __slots__ = ("_batch", "_stage", "_start")

    def __init__(self, batch: StagedBatch, stage: str) -> None:
        self._batch, self._stage = batch, stage

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self._batch.stages[self._stage] = self._start, time.monotonic_ns()
