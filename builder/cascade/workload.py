"""Labelled texts and the levels that answer them: computes all that candidates are tried on."""

from __future__ import annotations

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
from builder.cascade.sheet_times import SheetTimes, TimedLevel, timed
from builder.store.store import TenantFile
from builder.training.examples import Reader, Texts
from builder.training.labelled import Labelled
from builder.training.tasks import TrainingTask
from hplm.engine.engine import Precision
from hplm.errors import Broken
from hplm.levels.dispatch import draw
from hplm.levels.pruning import NO_WORD, kept


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
    known_times: Sequence[SheetTimes] | None = None  # by level, as a profile has measured them; None: measured now
    last_is_watched: bool = False  # another backbone reads what its last level leaves

    @property
    def prunes(self) -> bool:
        """Whether words may go. Those that an answer is about never do."""
        return self.task.served.reads_first_token

    @property
    def watched(self) -> int:
        """How many levels, the shallowest first, may be asked how much attention tokens receive."""
        return (len(self.levels) if self.last_is_watched else len(self.levels) - 1) if self.prunes else 0

    @cached_property
    def words(self) -> list[np.ndarray]:
        """The number of each token's word, text by text."""
        return self.reader.words(self.labelled, self.task)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens of each text, in all its windows."""
        return np.array([sum(own) for own in self._by_text(self.texts.lengths.tolist())])

    @cached_property
    def times(self) -> Sequence[SheetTimes]:
        """By level: the seconds of its sheets."""
        if self.known_times is not None:
            return self.known_times
        tokens = round(float(self.texts.lengths.mean()))
        rows = round(float(np.mean([len(text.spans) for text in self.texts.texts])))
        levels = [TimedLevel.open(level, self.device, self.precision) for level in self.levels]
        return timed(levels, tokens, rows, self.watched)

    @cached_property
    def whole(self) -> list[Computed]:
        """By level: what it makes of whole texts."""
        found: list[Computed] = []
        for number, level in enumerate(self.levels):
            watch = number < self.watched
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
            times=self.times,
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
