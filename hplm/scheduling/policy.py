"""A policy chooses the next batch: `select(waiting, now_ns, capacity)`, a list in and a list out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hplm.errors import InvalidInput
from hplm.scheduling.waiting import Capacity, Waiting


class Policy(Protocol):
    def select(self, waiting: Sequence[Waiting], now_ns: int, capacity: Capacity) -> list[Waiting]:
        """The next batch out of `waiting`, which is in order of arrival and holds nothing expired.

        Never empty while something waits, never more than `capacity`, nothing twice.
        """
        ...


class FirstComeFirstServed:
    """In order of arrival within a priority; stops at the first text that does not fit, so that nobody is overtaken."""

    def select(self, waiting: Sequence[Waiting], now_ns: int, capacity: Capacity) -> list[Waiting]:
        return fill(sorted(waiting, key=lambda text: -text.priority), capacity)


def fill(ordered: Iterable[Waiting], capacity: Capacity) -> list[Waiting]:
    """The longest prefix that fits; at least one text, so that the line always moves."""
    batch: list[Waiting] = []
    tokens, tenants = 0, set()
    for text in ordered:
        tokens += text.tokens
        tenants.add(text.knowledge)
        if batch and (tokens > capacity.tokens or len(batch) >= capacity.texts or len(tenants) > capacity.tenants):
            break
        batch.append(text)
    return batch


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed}


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise InvalidInput(f"policy {name!r} is not known: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
