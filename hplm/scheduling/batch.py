"""A batch: texts that run together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic

from hplm.scheduling.selection import Places
from hplm.scheduling.waiting import T


@dataclass(eq=False)
class Batch(Generic[T]):
    """Texts of one backbone that were chosen to run together, with their times."""

    texts: list[T]
    backbone: int
    tokens: int
    slot_keys: int
    chosen_ns: int
    expected_ns: float  # how long it will compute
    alone: bool  # chosen while no other batch ran: its staging overlapped with nothing
    places: Places | None = None  # of the texts, if the policy has chosen them
    is_half: bool = False  # of a batch for which the device had no memory
    started_ns: int | None = None
    judged: set[T] = field(default_factory=set)  # texts that were answered before its end
    on_time: int = 0  # judged texts with a deadline
    late: int = 0

    def judge(self, texts: Iterable[T], answered_ns: int) -> None:
        """Counts which of these texts are answered by their deadlines."""
        for text in texts:
            if text.deadline_ns and text not in self.judged:
                self.late += text.deadline_ns < answered_ns
                self.on_time += text.deadline_ns >= answered_ns
        self.judged.update(texts)
