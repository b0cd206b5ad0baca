"""A batch: texts that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from hplm.arrays import Array
from hplm.scheduling.columns import NEVER
from hplm.scheduling.selection import Places
from hplm.scheduling.waiting import T


@dataclass(eq=False)
class Batch(Generic[T]):
    """Texts that were chosen to run together, with their times."""

    texts: list[T]
    tokens: int
    slot_keys: int
    chosen_ns: int
    expected_ns: float  # how long it will compute
    alone: bool  # chosen while no other batch ran: its staging overlapped with nothing
    promised: Array  # the deadline of each text that is not judged yet, else NEVER
    places: Places | None = None  # of the texts, if the policy has chosen them
    on_time: int = 0  # texts
    late: int = 0
    backbone: int = 0  # of all its texts
    is_half: bool = False  # of a batch for which the device had no memory
    started_ns: int | None = None
    released_ns: int | None = None  # when it left the first stage of a pipeline

    def judge(self, texts: Sequence[T], answered_ns: int) -> None:
        """Counts which of these texts are answered by their deadlines."""
        if self.promised.min(initial=NEVER) == NEVER:
            return
        done = {id(text) for text in texts}
        judged = np.array([id(text) in done for text in self.texts]) & (self.promised < NEVER)
        late = int(np.count_nonzero(self.promised[judged] < answered_ns))
        self.late += late
        self.on_time += int(np.count_nonzero(judged)) - late
        self.promised[judged] = NEVER
