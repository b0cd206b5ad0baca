"""A batch: texts that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    promised: Array  # the deadline of each text if admission has promised it and its first pass is to come, else NEVER
    places: Places | None = None  # of the texts, if the policy has chosen them
    parts: int = 0  # that were computed one after the other
    further_tokens: int = 0  # of texts that are computed again in it
    further_texts: int = 0
    left_tokens: int = field(init=False)  # still to be computed in it
    left_texts: int = field(init=False)
    on_time: int = 0  # promised texts, by the end of their first pass
    late: int = 0
    backbone: int = 0  # of all its texts
    is_half: bool = False  # of a batch for which the device had no memory
    started_ns: int | None = None
    released_ns: int | None = None  # when it left the first stage of a pipeline

    def __post_init__(self) -> None:
        self.left_tokens, self.left_texts = self.tokens, len(self.texts)

    def computed(self, texts: Sequence[T]) -> None:
        """Records that a part of it is computed: these texts."""
        self.parts += 1
        self.left_tokens -= sum(text.tokens for text in texts)
        self.left_texts -= len(texts)

    def go_on(self, texts: Sequence[T]) -> None:
        """Records that these texts are computed again in it."""
        tokens = sum(text.tokens for text in texts)
        self.further_tokens += tokens
        self.left_tokens += tokens
        self.further_texts += len(texts)
        self.left_texts += len(texts)

    def judge(self, texts: Sequence[T], answered_ns: int) -> None:
        """Counts which of these texts have their first answer by their deadlines. Later answers are not promised."""
        if self.promised.min(initial=NEVER) == NEVER:
            return
        done = {id(text) for text in texts}
        judged = np.array([id(text) in done for text in self.texts]) & (self.promised < NEVER)
        late = int(np.count_nonzero(self.promised[judged] < answered_ns))
        self.late += late
        self.on_time += int(np.count_nonzero(judged)) - late
        self.promised[judged] = NEVER
