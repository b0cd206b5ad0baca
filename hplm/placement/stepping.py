"""The screen's loop in Python, as kernel.c has it, for readers and for where no compiler was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hplm.placement.attained import REFUSED
from hplm.placement.kernel import NEVER, ScreenCase

Sums = tuple[float, float, float]  # tokens, scores and texts of a batch


class Steps:
    def __init__(self, case: ScreenCase, most: int) -> None:
        """`most`: texts of a batch."""
        self._case = case
        self._most = most
        self._terms: list[list[list[list[float]]]] = case.terms.tolist()
        self._around: list[list[float]] = case.around.tolist()
        self._depth: list[int] = case.depth.tolist()
        self._clock: list[list[float]] = case.clock.tolist()
        self._busy = [0.0] * len(self._depth)
        self._wakes = [NEVER] * len(self._depth)  # when the first stage of each group is free; NEVER: it is idle
        self._line: list[int] = case.line.tolist()
        self._backbone: list[int] = case.backbone.tolist()
        self._groups_of: list[list[int]] = [np.flatnonzero(own).tolist() for own in case.serves]
        self._lines_of: list[list[int]] = [np.flatnonzero(own).tolist() for own in case.serves.T]
        arrival: list[int] = case.arrival.tolist()
        timeout: list[int] = case.timeout.tolist()
        unit: list[int] = case.unit.tolist()
        tokens: list[int] = case.tokens.tolist()
        self._texts = list(zip(arrival, timeout, unit, tokens, strict=True))
        self._end = [REFUSED] * len(self._texts)
        self._waiting: list[deque[int]] = [deque() for _ in self._backbone]

    def run(self) -> None:
        """An idle group takes a text at once. One that becomes idle takes the oldest ones that stay in time."""
        for i, (arrival, _, unit, _) in enumerate(self._texts):
            self._wake(float(arrival))
            if (line := self._line[unit]) < 0:
                continue
            self._waiting[line].append(i)
            idle = next((group for group in self._groups_of[line] if self._wakes[group] == NEVER), None)
            if idle is not None:
                self._wakes[idle] = self._start(idle, float(arrival))
        self._wake(NEVER / 2)
        self._case.end[:], self._case.busy[:] = self._end, self._busy
        for group, clock in enumerate(self._clock):
            self._case.clock[group] = clock

    def _wake(self, now: float) -> None:
        """Lets groups whose first stage is free by now start their next batches."""
        while self._wakes and (at := min(self._wakes)) <= now:
            group = self._wakes.index(at)
            self._wakes[group] = self._start(group, at)

    def _start(self, group: int, now: float) -> float:
        """Starts the group's next batch. Returns when its first stage is free again, or NEVER if nothing waits."""
        chosen: list[int] = []
        sums, until, ends, backbone = (0.0, 0.0, 0.0), NEVER, [0.0], -1
        while len(chosen) < self._most and (line := self._oldest(group, backbone)) is not None:
            i = self._waiting[line][0]
            arrival, timeout, _, tokens = self._texts[i]
            more = sums[0] + tokens, sums[1] + tokens * tokens, sums[2] + 1
            with_it = self._ends(group, self._backbone[line], now, more)
            latest = min(until, float(arrival + timeout))
            if chosen and with_it[-1] > latest:
                break
            self._waiting[line].popleft()
            if with_it[-1] > latest:
                continue  # it is refused
            chosen.append(i)
            sums, until, ends, backbone = more, latest, with_it, self._backbone[line]
        if not chosen:
            return NEVER
        depth, took = self._depth[group], 0.0
        for terms in self._terms[group][backbone][:depth]:
            took += _took(terms, sums)  # sum() rounds in another way than the kernel
        self._clock[group][:depth], self._busy[group] = ends[:-1], self._busy[group] + took / depth
        for i in chosen:
            self._end[i] = ends[-1]
        return ends[0]

    def _oldest(self, group: int, backbone: int) -> int | None:
        """Returns the line of the group whose first text is the oldest. `backbone`: only its lines; -1: all."""
        waiting = [line for line in self._lines_of[group] if self._waiting[line] and backbone in (-1, self._backbone[line])]
        return min(waiting, key=lambda line: self._waiting[line][0], default=None)

    def _ends(self, group: int, backbone: int, now: float, sums: Sums) -> list[float]:
        """Returns when each stage ends a batch that is ready now, and when it is answered: after the way around them."""
        ends: list[float] = []
        for clock, terms in zip(self._clock[group][: self._depth[group]], self._terms[group][backbone], strict=False):
            ends.append(now := max(now, clock) + _took(terms, sums))
        return [*ends, now + _took(self._around[backbone], sums)]


def _took(terms: Sequence[float], sums: Sums) -> float:
    tokens, scores, texts = sums
    return terms[0] + terms[1] * tokens + terms[2] * scores + terms[3] * texts
