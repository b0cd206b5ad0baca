"""A staged batch: all that the engine needs, and the way of unsure texts from one stack to the next within the batch."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hplm.adapters.copying import Mark
from hplm.adapters.layout import Layout
from hplm.adapters.parts import Placed
from hplm.adapters.record import Record
from hplm.adapters.slots import Slots
from hplm.arrays import Array
from hplm.engine.request import Text
from hplm.engine.sheets import Sheet, Sheets
from hplm.model.sending import sent
from hplm.model.tensors import tensor_of
from hplm.plot.forest import Forest
from hplm.tenants.level import FULL


@dataclass
class StagedBatch:
    texts: list[Text]
    forest: Forest
    sheets: list[Sheet]  # in the order in which they are computed: shallow stacks first
    placed: Mapping[Record, Placed]  # the adapters and heads of its texts, also those of levels that they may reach
    slots: Mapping[Layout, Slots]
    arrived: dict[Layout, list[Mark]]  # the marks of its sheets' parts; empty until copying starts
    held: list[tuple[Slots, int]]
    laying: Sheets
    brought: int = 0  # adapters and heads that had to be copied
    ready: Mark = field(init=False)  # after it all tensors of the sheets are on the device
    number: int = 0  # of the batch, once it has started
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)  # start and end of each step, in nanoseconds
    computing_ns: list[int] = field(default_factory=list)  # how long each stage of the engine has computed it
    _begun: int = 0  # sheets
    _going_on: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # texts, by the stack at which they stand now
    _joined: list[Sheet] = field(default_factory=list[Sheet])  # their vectors may still be read when their texts lie elsewhere

    @property
    def tokens(self) -> int:
        return sum(int(sheet.lengths.sum()) for sheet in self.sheets)

    @property
    def stages_ns(self) -> list[int]:
        """How long each stage has computed it. Only the last stage computes shallow stacks, so without others it is alone."""
        return self.computing_ns if any(sheet.stack == FULL for sheet in self.sheets) else self.computing_ns[-1:]

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        start = time.monotonic_ns()
        yield
        self.stages[stage] = start, time.monotonic_ns()

    def next_sheets(self) -> list[Sheet]:
        """Returns the sheets of the next stack, each sheet once. Returns none when all are computed."""
        stacks = {*self._going_on, *(sheet.stack for sheet in self.sheets[self._begun :])}
        if not stacks:
            return []
        stack = min(stacks, key=self.laying.order_of)
        if stack in self._going_on:
            self._lay(stack, self._going_on.pop(stack))
        found = [sheet for sheet in self.sheets[self._begun :] if sheet.stack == stack]
        self._begun += len(found)
        return found

    def has_level_of(self, text: Text) -> bool:
        """Whether the level at which a text stands now is in slots that the batch holds."""
        return all(record in self.placed for record in text.level.records())

    def go_on(self, indexes: Sequence[int]) -> None:
        """Lets computed texts, by their indexes, be computed by the stacks at which they stand now.

        They take their vectors with them, and share the sheets of the texts that wait for the same stacks: a small sheet of
        their own would take more time for each token. The batch has the levels of all of them.
        """
        for index in indexes:
            self._going_on.setdefault(self.texts[index].level.stack, []).append(index)

    def _lay(self, stack: str, joining: Sequence[int]) -> None:
        """Lays texts into the sheets of a stack that is next."""
        computed, waiting = self.sheets[: self._begun], self.sheets[self._begun :]
        joined = [sheet for sheet in waiting if sheet.stack == stack]
        together = [*joining, *(index for sheet in joined for index in sheet.indexes)]
        laid = self.laying.lay(self.texts, self.placed, self.slots, self.arrived, np.array(together))
        lies = {
            index: (sheet, *own)
            for sheet in [*computed, *joined]
            for index, own in zip(sheet.indexes, sheet.places(), strict=True)
        }
        for sheet in laid:
            sheet.sums = _taken_over(sheet, lies)
        self._joined += joined
        self.sheets[self._begun :] = [*laid, *(sheet for sheet in waiting if sheet.stack != stack)]


def _taken_over(sheet: Sheet, lies: Mapping[int, tuple[Sheet, Array, Array]]) -> Tensor:
    """Returns the vectors of a sheet. `lies`: of each text the sheet that has them, the rows of its tokens, and these."""
    moves: dict[int, tuple[Tensor, list[Array], list[Array]]] = {}  # by source: its vectors, rows there, rows here
    for index, (rows, tokens) in zip(sheet.indexes, sheet.places(), strict=True):
        source, had_rows, had_tokens = lies[index]
        assert source.sums is not None  # all were gathered before the first sheet was computed
        _, taken, put = moves.setdefault(id(source), (source.sums, [], []))
        taken.append(had_rows[np.searchsorted(had_tokens, tokens)])  # a pruned text has only some of them
        put.append(rows)
    some = next(iter(moves.values()))[0]
    sums = some.new_zeros(len(sheet.positions), some.shape[1])
    for vectors, taken, put in moves.values():
        sums.index_copy_(0, _index(put, vectors), vectors.index_select(0, _index(taken, vectors)))
    return sums


def _index(rows: Iterable[Array], vectors: Tensor) -> Tensor:
    return sent(tensor_of(np.concatenate(list(rows))), vectors.device)
