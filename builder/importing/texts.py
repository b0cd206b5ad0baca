"""Texts without labels, from which tenants learn to answer like their checkpoints. They are read once for many tenants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from builder.tables.text_files import digest_of_file
from builder.tasks.examples import Example, key_of, read_unlabelled
from builder.tasks.lookup import Reader, Texts
from builder.tasks.tasks import TrainingTask
from hplm.errors import InvalidInput

FEWEST, MOST_READ = 50, 100_000  # different texts that a file needs, and that are read of it
HELD_OUT, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.15, 50, 500  # the share of the texts that only judges, and its bounds
MOST_TOKENS = 250_000  # to learn from: long documents take as long as many short ones


@dataclass(frozen=True)
class UnlabelledTexts:
    """A file of texts, which is read once for many checkpoints."""

    path: Path

    @cached_property
    def digest(self) -> str:
        return digest_of_file(self.path)

    @cached_property
    def examples(self) -> list[Example]:
        """The first texts of the file, each once."""
        found: dict[tuple[str, ...], Example] = {}
        for example in read_unlabelled(self.path):
            found.setdefault(key_of(example), example)
            if len(found) == MOST_READ:
                break
        if len(found) < FEWEST:
            raise InvalidInput(f"{self.path} has {len(found)} different texts: to learn from them needs {FEWEST} or more")
        return list(found.values())

    def divided(
        self, reader: Reader, task: TrainingTask, labels: list[str], most: int, seed: int, show: bool
    ) -> tuple[Texts, Texts]:
        """Returns the texts to learn from, and those that only judge. `most`: of both."""
        order = np.random.default_rng(seed).permutation(len(self.examples))[:most].tolist()
        held_out = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, round(HELD_OUT * len(order))), len(order) // 2)
        learned, judged = (
            _first(reader.read([self.examples[i] for i in part], task, labels, show), share)
            for part, share in ((order[held_out:], 1.0), (order[:held_out], HELD_OUT))
        )
        return learned, judged


def _first(texts: Texts, share: float) -> Texts:
    """Returns the first texts, up to a share of the tokens that one import reads."""
    count = max(1, int(np.searchsorted(np.cumsum(texts.lengths), share * MOST_TOKENS, side="right")))
    while count < len(texts.texts) and texts.texts[count].window:  # the windows of a text stay together
        count += 1
    return replace(texts, texts=texts.texts[:count], lengths=texts.lengths[:count])
