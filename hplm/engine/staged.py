"""A staged batch: all that the engine needs."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
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

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        start = time.monotonic_ns()
        yield
        self.stages[stage] = start, time.monotonic_ns()
