"""Labelled texts and the levels that answer them: computes all that candidates are tried on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from builder.cascade.answering import Computed, computed
from builder.cascade.candidates import MOST_LEVELS, Answered, Measured
from builder.cascade.kept import Kept
from builder.cascade.levels import OpenLevel
from builder.store.store import TenantFile
from builder.training.examples import Reader, Texts
from builder.training.labelled import Labelled
from builder.training.tasks import TrainingTask
from hplm.engine.engine import Engine, Precision
from hplm.errors import Broken
from hplm.levels.dispatch import draw
from hplm.levels.pruning import NO_WORD, kept

SHORTEST = 4  # tokens of a text whose seconds are measured: pruned texts may be shorter than all whole ones
TURNS = 3  # in which the levels are timed, so that a slow moment of the machine is not one level's alone
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the texts' tokens, for which seconds are measured


@dataclass(frozen=True)
class Workload:
    tenant: TenantFile
    task: TrainingTask
    levels: Sequence[OpenLevel]  # the shallowest first
    labelled: Labelled
    reader: Reader
    texts: Texts  # the same texts, looked up
    precision: Precision
    device: torch.device
    answers: Kept
    known_seconds: Sequence[dict[int, float]] | None = None  # by level, as a profile has measured them; None: measured now
    last_is_watched: bool = False  # another backbone reads what its last level leaves

    @property
    def prunes(self) -> bool:
        """Whether words may go. Those that an answer is about never do."""
        return self.task.served.reads_first_token

    @cached_property
    def words(self) -> list[np.ndarray]:
        """The number of each token's word, text by text."""
        return self.reader.words(self.labelled, self.task)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens of each text, in all its windows."""
        return np.array([sum(own) for own in self._by_text(self.texts.lengths.tolist())])

    @cached_property
    def seconds(self) -> Sequence[dict[int, float]]:
        """By level: the seconds that single texts take, by their tokens."""
        if self.known_seconds is not None:
            return self.known_seconds
        tokens = sorted({SHORTEST, *np.quantile(self.tokens, QUANTILES).astype(int).tolist()})
        engines = [Engine(level.open(), self.device, self.precision.dtype, self.precision.eight_bits) for level in self.levels]
        found = [dict.fromkeys(tokens, math.inf) for _ in engines]
        for _ in range(TURNS):
            for engine, own in zip(engines, found, strict=True):
                for count in tokens:
                    own[count] = min(own[count], engine.seconds(1, count))
        return found

    @cached_property
    def whole(self) -> list[Computed]:
        """By level: what it makes of whole texts."""
        found: list[Computed] = []
        for level in self.levels:
            watch = self.prunes and (self.last_is_watched or level is not self.levels[-1])
            found.append(self.answers(partial(self._computed, level, watch=watch), level=level.digest))
            if not all(np.isfinite(logits).all() for logits in found[-1].logits):
                where = f"level {level.name!r} of tenant {self.tenant.id!r}"
                raise Broken(f"{where} has logits that are not finite: train it again, with a lower rate")
        return found

    def measured(self) -> Measured:
        every = [self._answered(own, self.tokens, self.words if self.prunes else None) for own in self.whole]
        windows = self._by_text(self.texts.texts)
        return Measured(
            task=self.task,
            labels=self.tenant.labels,
            examples=self.texts.examples,
            spans=self._joined([text.spans for text in self.texts.texts]),
            draws=np.array(
                [[draw(own[0].addresses, self.tenant.version, step) for own in windows] for step in range(MOST_LEVELS - 1)]
            ),
            whole=every,
            pruned=cache(self._pruned) if self.prunes else None,
            calibrations=[level.calibration for level in self.levels[:-1]],
            depths=[level.layers / self.levels[-1].layers for level in self.levels],
            seconds=[partial(_interpolated, own) for own in self.seconds],
            in_one=np.array([len(own) == 1 for own in windows]),
        )

    def _pruned(self, first: int, later: int, alpha: float) -> Answered:
        stay, level = self.stay(first, alpha), self.levels[later]
        found = self.answers(
            partial(self._computed, level, stay=stay), level=level.digest, left_by=self.levels[first].digest, alpha=alpha
        )
        left = [words[own] for words, own in zip(self.words, stay, strict=True)]
        return self._answered(found, np.array([len(own) for own in left]), left)

    def answered_by(self, level: OpenLevel, **kept_by: Any) -> Answered:
        """Returns what a level answers to whole texts. `kept_by`: what tells these texts from others."""
        found = self.answers(partial(self._computed, level), level=level.digest, **kept_by)
        return self._answered(found, self.tokens, None)

    def stay(self, level: int, alpha: float) -> list[np.ndarray]:
        """Returns which tokens of each text a level leaves."""
        return [kept(own, words, alpha) for own, words in zip(self.whole[level].received, self.words, strict=True)]

    def _computed(self, level: OpenLevel, watch: bool = False, stay: Sequence[np.ndarray] | None = None) -> Computed:
        return computed(level, self.reader, self.texts, self.precision, self.device, watch, stay)

    def _answered(self, found: Computed, tokens: np.ndarray, words: Sequence[np.ndarray] | None) -> Answered:
        counts = words_in(words) if words is not None else np.zeros(len(tokens), dtype=np.int64)
        return Answered(self._joined(found.logits), tokens, counts)

    def _by_text(self, parts: Sequence[Any]) -> list[Sequence[Any]]:
        """Returns the parts of each text, of which each window has one."""
        starts = [number for number, text in enumerate(self.texts.texts) if text.window == 0]
        return [parts[start:stop] for start, stop in pairwise([*starts, len(parts)])]

    def _joined(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate(own) for own in self._by_text(parts)]


def words_in(words: Sequence[np.ndarray]) -> np.ndarray:
    """Returns how many words each text has, from the numbers of its tokens' words."""
    return np.array([len(np.unique(own[own != NO_WORD])) for own in words])


def _interpolated(seconds: dict[int, float], tokens: np.ndarray) -> np.ndarray:
    return np.interp(tokens, list(seconds), list(seconds.values()))
