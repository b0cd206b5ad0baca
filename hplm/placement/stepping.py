"""The screen's loops in Python, as kernel.c has them, for readers and for where no compiler was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hplm.placement.attained import REFUSED
from hplm.placement.case import Case

NEVER = 1e300
Sums = tuple[float, float, float]  # tokens, scores and texts of a batch


class Steps:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._terms: list[list[list[list[float]]]] = case.terms.tolist()
        self._around: list[list[float]] = case.around.tolist()
        self._depth: list[int] = case.depth.tolist()
        self._clock: list[list[float]] = case.clock.tolist()
        self._busy = [0.0] * len(self._depth)
        self._backbone: list[int] = case.backbone.tolist()
        self._groups_of = _lists(case.first_group.tolist(), case.group.tolist())
        self._units_of = _lists(case.first_unit.tolist(), case.units_of.tolist())
        arrival: list[int] = case.arrival.tolist()
        timeout: list[int] = case.timeout.tolist()
        unit: list[int] = case.unit.tolist()
        tokens: list[int] = case.tokens.tolist()
        self._texts = list(zip(arrival, timeout, unit, tokens, strict=True))
        self._end = [REFUSED] * len(self._texts)
        self._lines: list[deque[int]] = [deque() for _ in self._backbone]

    def one_by_one(self) -> None:
        """First come, first served: the shortest queue takes a text at once, unless it would be late."""
        for i, (arrival, timeout, unit, tokens) in enumerate(self._texts):
            if not self._groups_of[unit]:
                continue
            # The shortest queue is that of the group whose first stage is free first.
            queues = [max(clock[0], arrival) for clock in self._clock]
            group, backbone = min(self._groups_of[unit], key=queues.__getitem__), self._backbone[unit]
            sums = float(tokens), float(tokens * tokens), 1.0
            end = self._passes(group, backbone, float(arrival), sums) + _took(self._around[backbone], sums)
            if not timeout or end - arrival <= timeout:
                self._take(group, backbone, float(arrival), sums)
                self._end[i] = end
        self._write()

    def in_batches(self, most: int) -> None:
        """AlpaServe 6.5: an idle group takes a text at once. One that becomes idle takes the oldest ones that stay in time."""
        wakes = [NEVER] * len(self._depth)
        for i, (arrival, _, unit, _) in enumerate(self._texts):
            self._wake(wakes, float(arrival), most)
            if not self._groups_of[unit]:
                continue
            self._lines[unit].append(i)
            idle = next((group for group in self._groups_of[unit] if wakes[group] == NEVER), None)
            if idle is not None:
                wakes[idle] = self._start(idle, float(arrival), most)
        self._wake(wakes, NEVER / 2, most)
        self._write()

    def _wake(self, wakes: list[float], now: float, most: int) -> None:
        while wakes and (at := min(wakes)) <= now:
            group = wakes.index(at)
            wakes[group] = self._start(group, at, most)

    def _start(self, group: int, now: float, most: int) -> float:
        """Starts the group's next batch. Returns when its first stage is free again, or NEVER if nothing waits."""
        chosen: list[int] = []
        sums, until, backbone = (0.0, 0.0, 0.0), NEVER, -1
        while len(chosen) < most and (unit := self._oldest(group, backbone)) is not None:
            i = self._lines[unit][0]
            arrival, timeout, _, tokens = self._texts[i]
            more = sums[0] + tokens, sums[1] + tokens * tokens, sums[2] + 1
            own = self._backbone[unit]
            end = self._passes(group, own, now, more) + _took(self._around[own], more)
            latest = min(until, float(arrival + timeout) if timeout else NEVER)
            if chosen and end > latest:
                break
            self._lines[unit].popleft()
            if not chosen and timeout and end - arrival > timeout:
                continue  # it is refused
            chosen.append(i)
            sums, until, backbone = more, latest, own
        if not chosen:
            return NEVER
        end = self._passes(group, backbone, now, sums) + _took(self._around[backbone], sums)
        self._take(group, backbone, now, sums)
        for i in chosen:
            self._end[i] = end
        return self._clock[group][0]

    def _oldest(self, group: int, backbone: int) -> int | None:
        """Returns the unit of the group whose first text is the oldest. `backbone`: only its units; -1: all."""
        waiting = [unit for unit in self._units_of[group] if self._lines[unit] and backbone in (-1, self._backbone[unit])]
        return min(waiting, key=lambda unit: self._lines[unit][0], default=None)

    def _passes(self, group: int, backbone: int, now: float, sums: Sums) -> float:
        """Returns when a batch that is ready now has passed all stages."""
        for clock, terms in self._stages(group, backbone):
            now = max(now, clock) + _took(terms, sums)
        return now

    def _take(self, group: int, backbone: int, now: float, sums: Sums) -> None:
        took = 0.0
        for stage, (clock, terms) in enumerate(list(self._stages(group, backbone))):
            own = _took(terms, sums)
            self._clock[group][stage] = now = max(now, clock) + own
            took += own
        self._busy[group] += took / self._depth[group]

    def _stages(self, group: int, backbone: int) -> Iterator[tuple[float, list[float]]]:
        return zip(self._clock[group][: self._depth[group]], self._terms[group][backbone], strict=False)

    def _write(self) -> None:
        self._case.end[:], self._case.busy[:] = self._end, self._busy
        for group, clock in enumerate(self._clock):
            self._case.clock[group] = clock


def _took(terms: Sequence[float], sums: Sums) -> float:
    tokens, scores, texts = sums
    return terms[0] + terms[1] * tokens + terms[2] * scores + terms[3] * texts


def _lists(firsts: list[int], flat: list[int]) -> list[list[int]]:
    return [flat[start:end] for start, end in pairwise(firsts)]
