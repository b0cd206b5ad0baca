"""The number of times that each n-gram of a corpus occurs, whole windows and shorter forms.

    meta.json         the vocabulary, the window, the corpus' size, and how many distinct n-grams each level has
    keys-<level>      uint64, rows x words, sorted; level 0 are whole windows, then come the shorter forms (`Window.levels`)
    counts-<level>    uint64, how many windows are of this form once shrunken to it

Each form is in one level, the deepest it fits in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from builder.store.resumable import META
from builder.tables.sorted_runs import Run
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace

SORTED_CHUNKS = 4  # the chunks that are sorted at once, of all levels together


class Counts:
    def __init__(self, folder: Path) -> None:
        if not (folder / META).exists():
            raise InvalidInput(f"{folder} holds no finished counts: count a corpus into it first")
        meta = json.loads((folder / META).read_text("utf-8"))
        self.folder = folder
        self.tokens: int = meta["tokens"]
        self.documents: int = meta["documents"]
        self.space = KeySpace(meta["vocabulary"], Window(meta["n"], meta["causal"]))
        self.levels: list[int] = meta["distinct"]
        for level, rows in enumerate(self.levels):
            self.run(level).check(rows)

    @property
    def distinct(self) -> int:
        return sum(self.levels)

    def run(self, level: int) -> Run:
        return level_run(self.folder, level, self.space)

    def most_frequent(self, level: int, number: int, chunk: int) -> Iterator[np.ndarray]:
        """Yields at least the `number` most frequent keys of a level, of equally frequent ones the smaller first."""
        for least, most in self._bands(level, number, chunk):
            if least == most:  # all equally frequent: on disk they are in order already
                yield from (keys for keys, _ in self._between(level, least, most, chunk))
            else:
                keys, counts = map(np.concatenate, zip(*self._between(level, least, most, chunk), strict=True))
                yield keys[np.argsort(-counts.astype(np.int64), kind="stable")]

    def _bands(self, level: int, number: int, chunk: int) -> list[tuple[int, int]]:
        """Returns ranges of counts, (least, most), the highest first: single counts, or as many as can be sorted at once."""
        histogram: Counter[int] = Counter()
        for start, stop in self._blocks(level, chunk):
            values, rows = np.unique(self.run(level).read_counts(start, stop), return_counts=True)
            histogram.update(dict(zip(values.tolist(), rows.tolist(), strict=True)))
        bands: list[tuple[int, int]] = []
        seen = held = 0
        for value in sorted(histogram, reverse=True):
            if seen >= number:
                break
            if bands and held + histogram[value] <= SORTED_CHUNKS * chunk // len(self.levels):
                bands[-1] = (value, bands[-1][1])
                held += histogram[value]
            else:
                bands.append((value, value))
                held = histogram[value]
            seen += histogram[value]
        return bands

    def _between(self, level: int, least: int, most: int, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        run = self.run(level)
        for start, stop in self._blocks(level, chunk):
            counts = run.read_counts(start, stop)
            chosen = np.flatnonzero((counts >= np.uint64(least)) & (counts <= np.uint64(most)))
            if len(chosen):
                yield run.read_keys(start, stop)[chosen], counts[chosen]

    def _blocks(self, level: int, chunk: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.levels[level], chunk):
            yield start, min(start + chunk, self.levels[level])


def level_run(folder: Path, level: int, space: KeySpace) -> Run:
    return Run(folder / f"keys-{level}", folder / f"counts-{level}", space.words)
