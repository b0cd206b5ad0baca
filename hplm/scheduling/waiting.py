"""A waiting text as the scheduler sees it, and the capacity of a batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import TypeVar


class Waiting(Protocol):
    """A waiting text, of the engine or simulated. Times are nanoseconds of the queue's clock."""

    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int: ...  # memory that it keeps while it waits
    @property
    def arrival_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...  # 0: no deadline
    @property
    def priority(self) -> int: ...  # higher goes first, in policies that use it
    @property
    def slot_key(self) -> Hashable: ...  # texts with the same key share device slots
    @property
    def tenant(self) -> int: ...  # the tenant whose fair share it uses; no other backbone's tenant has this number
    @property
    def backbone(self) -> int: ...  # a small number: texts of one batch are of one backbone


# The type of the texts in a queue. Policies and admission do not name it: they take columns of any texts.
T = TypeVar("T", bound=Waiting, default=Any)


@dataclass(frozen=True)
class Capacity:
    """The most that fits in one batch."""

    tokens: int
    texts: int
    tenants: int  # device slots: the most different slot keys in a batch
    in_flight: int = 2  # batches that are chosen and not finished: one in each stage of the engine, and the next one
