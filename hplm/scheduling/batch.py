"""A batch: texts that run together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from hplm.arrays import Array
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
    promised: Array  # the deadline of each text if admission has promised it, else NEVER
    places: Places | None = None  # of the texts, if the policy has chosen them
    passes: int = 1  # one more whenever texts are computed again in it: so many tokens and texts, in a time by prediction
    further_tokens: int = 0
    further_texts: int = 0
    further_ns: float = 0.0
    is_half: bool = False  # of a batch for which the device had no memory
    started_ns: int | None = None
    released_ns: int | None = None  # when it left the first stage of a pipeline
