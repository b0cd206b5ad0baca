"""Simulated cascades: texts whose first answer may not be enough, and the ladders of the tenants that send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hplm.scheduling.simulation.arrivals import SimulatedText


@dataclass(frozen=True)
class SimulatedRung:
    """A way to answer: one pass, and for some of the texts a second one. Costs are passes through all layers."""

    first: float = 1.0
    second: float = 0.0
    goes_on: float = 0.0  # share of the texts that take the second pass
    right: float = 1.0  # share of right answers
    right_in_hand: float = 1.0  # the same of texts that should have taken the second pass, and did not

    @property
    def cost(self) -> float:
        """The expected one."""
        return self.first + self.goes_on * self.second


PLAIN = (SimulatedRung(),)
Ladders = Mapping[int, Sequence[SimulatedRung]]  # by tenant, the dearest rung first


class Cascades:
    """Draws what becomes of each text: the same draws for the same seed, whatever rungs are chosen."""

    def __init__(self, ladders: Ladders, count: int, seed: int) -> None:
        self._ladders = ladders
        self._rungs = [PLAIN[0]] * count
        self._is_first = np.ones(count, bool)
        self._unsure, self._wrong = np.random.default_rng(seed).random((2, count))

    def costs(self, tenant: int) -> tuple[float, ...]:
        return tuple(rung.cost for rung in self._ladders.get(tenant, PLAIN))

    def enter(self, text: SimulatedText, rung: int) -> SimulatedText:
        """Returns a text as it waits for its first pass."""
        chosen = self._rungs[text.number] = self._ladders.get(text.tenant, PLAIN)[rung]
        return _counting(text, work_of(text.tokens, chosen.first))

    def goes_on(self, text: SimulatedText, tokens: int) -> SimulatedText | None:
        """Returns a text, of so many tokens, as it takes its second pass; None if its answer is final."""
        rung, number = self._rungs[text.number], text.number
        if not self._is_first[number] or self._unsure[number] >= rung.goes_on:
            return None
        self._is_first[number] = False
        return _counting(text, work_of(tokens, rung.second))

    def layers(self, number: int) -> float:
        """The share of the layers that a text's current pass takes."""
        rung = self._rungs[number]
        return rung.first if self._is_first[number] else rung.second

    def has_answer(self, number: int) -> bool:
        """Whether a text has taken its first pass, and has not ended with it."""
        return not self._is_first[number]

    def is_right(self, number: int, in_hand: bool) -> bool:
        """Whether the answer is right: the final one, or the first one of a text that needed another."""
        rung = self._rungs[number]
        return bool(self._wrong[number] < (rung.right_in_hand if in_hand else rung.right))


def work_of(tokens: int, layers: float) -> int:
    """Returns tokens that take as much work through all layers as these do through a share of them."""
    return max(1, round(tokens * layers))


def _counting(text: SimulatedText, tokens: int) -> SimulatedText:
    return text if text.tokens == tokens else replace(text, tokens=tokens)
