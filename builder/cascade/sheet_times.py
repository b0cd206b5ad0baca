"""The time that a level takes for sheets of texts: small ones cost more for each token than a whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from builder.cascade.levels import OpenLevel
from builder.publish.model_configs import ServingOptions
from builder.training.model import TenantModel
from hplm.adapters.tiles import Tiles
from hplm.engine.engine import Engine, Precision
from hplm.scheduling.scheduler import LEAST_TOKENS

TURNS = 5  # in which the levels are timed, so that a slow moment of the machine is not one level's alone


@dataclass(frozen=True)
class SheetTimes:
    """The seconds of a level's sheets, by their tokens. The first sheet is a single text, the last one a whole batch."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    watched: tuple[float, ...]  # the same, where the attention that tokens receive is added up

    @property
    def batch(self) -> int:
        """The tokens of a whole batch."""
        return self.tokens[-1]

    @property
    def text(self) -> int:
        """The tokens of a mean text."""
        return self.tokens[0]

    def of_token(self, sheet: float, watched: bool = False) -> float:
        """Returns the seconds of a token in a sheet of so many tokens.

        A sheet with less than a text on average is a single text in some batches and missing in others.
        """
        size = min(max(sheet, self.text), self.batch)
        return float(np.interp(size, self.tokens, self.watched if watched else self.seconds)) / size

    def stored(self) -> dict[str, list[float]]:
        return {
            "tokens": list(self.tokens),
            "ms": [round(1000 * one, 4) for one in self.seconds],
            "watched_ms": [round(1000 * one, 4) for one in self.watched],
        }

    @classmethod
    def read(cls, stored: dict[str, Any]) -> SheetTimes:
        """Raises TypeError, KeyError or ValueError if it is not what `stored` has returned."""
        seconds, watched = ([float(one) / 1000 for one in stored[name]] for name in ("ms", "watched_ms"))
        found = cls(tuple(map(int, stored["tokens"])), tuple(seconds), tuple(watched))
        if not len(found.tokens) == len(found.seconds) == len(found.watched) > 0:
            raise ValueError("its levels have not as many times as sheets")
        if found.text < 1 or not all(before < after for before, after in pairwise(found.tokens)):
            raise ValueError(f"its levels have sheets of {stored['tokens']} tokens")
        if not all(0 < one < math.inf for one in (*found.seconds, *found.watched)):
            raise ValueError("its levels have times that are not above 0")
        return found


@dataclass(frozen=True)
class TimedLevel:
    """A level that an engine computes with the level's adapter."""

    engine: Engine
    model: TenantModel

    @classmethod
    def open(cls, level: OpenLevel, device: torch.device, precision: Precision) -> TimedLevel:
        model = TenantModel(level.adapter, level.head, seed=0)
        model.load(*level.weights)
        return cls(Engine(level.open(), device, precision.dtype, precision.eight_bits), model.to(device))

    def seconds(self, texts: int, tokens: int, rows: int, watch: bool = False) -> float:
        """Measures a sheet of texts of so many tokens, each with so many answer rows."""
        every, read = (Tiles(np.zeros(texts * own, dtype=np.int64), self.engine.device) for own in (tokens, min(rows, tokens)))
        return self.engine.seconds(texts, tokens, rows, self.model.adapts(every, read) or None, watch)


def timed(levels: Sequence[TimedLevel], tokens: int, rows: int, watched: int) -> list[SheetTimes]:
    """Measures sheets of one, two, four texts and so on, up to a whole batch.

    `levels`: the shallowest first, the tenant's own one last. `watched`: how many of them, the shallowest first, may be asked
    how much attention tokens receive.
    """
    counts = _counts(levels[-1], tokens, rows)
    best = np.full((2, len(levels), len(counts)), np.inf)  # without and with attention
    ways = [(False, number) for number in range(len(levels))] + [(True, number) for number in range(watched)]
    for _ in range(TURNS):
        for is_watched, number in ways:
            taken = [levels[number].seconds(count, tokens, rows, is_watched) for count in counts]
            best[int(is_watched), number] = np.minimum(best[int(is_watched), number], taken)
    for axis in range(best.ndim):  # less work never takes longer: if it did, something else was running
        best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis), axis)
    best[1] = np.where(np.isinf(best[1]), best[0], best[1])  # where nobody asks
    sheets = tuple(count * tokens for count in counts)
    plain, asked = best.tolist()
    return [SheetTimes(sheets, tuple(own), tuple(more)) for own, more in zip(plain, asked, strict=True)]


def _counts(own: TimedLevel, tokens: int, rows: int) -> list[int]:
    """Returns the texts of the sheets. The last one is a batch as a server with default options would choose it."""
    options = ServingOptions()
    least, most = math.ceil(LEAST_TOKENS / tokens), max(1, options.batch_tokens // tokens)
    counts = [1]
    while counts[-1] < most:
        count = min(most, 2 * counts[-1])
        taken = min(own.seconds(count, tokens, rows) for _ in range(TURNS))
        within = int(count * float(options.batch_ms) / 1000 / taken)
        if within < count:
            return sorted({*counts, max(counts[-1], least, within)})
        counts.append(count)
    return counts
