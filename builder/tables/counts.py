"""How often each n-gram of a corpus occurs, whole windows and shorter forms.

    meta.json         the vocabulary, the window, the corpus' size, and how many distinct n-grams each level has
    keys-<level>      uint64, rows x words, sorted; level 0 are whole windows, then come the shorter forms (`Window.levels`)
    counts-<level>    uint64, how many windows are of this form once shrunken to it

Each form is in one level, the deepest it fits in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from builder.options import check_keep
from builder.store.resumable import META
from builder.tables.sorted_runs import Run
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace

SORTED_CHUNKS = 4  # the chunks that `ranked` sorts at once


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

    def number(self, keep: float) -> int:
        check_keep(keep)
        return round(keep * self.distinct)

    def ranked(self, number: int, chunk: int = 1 << 20) -> Iterator[np.ndarray]:
        """Yields the most frequent keys, `chunk` at a time; of equally frequent ones the deeper level, then the smaller key."""
        left = min(number, self.distinct)
        for keys in _rechunked(self._by_frequency(number, chunk), chunk):
            if not left:
                return
            yield keys[:left]
            left -= len(keys[:left])

    def _by_frequency(self, number: int, chunk: int) -> Iterator[np.ndarray]:
        for least, most in self._bands(number, chunk):
            if least == most:  # all equally frequent: on disk they are in order already
                yield from (keys for keys, _ in self._between(least, most, chunk))
            else:
                keys, counts = map(np.concatenate, zip(*self._between(least, most, chunk), strict=True))
                yield keys[np.argsort(-counts.astype(np.int64), kind="stable")]

    def _bands(self, number: int, chunk: int) -> list[tuple[int, int]]:
        """Returns ranges of counts, (least, most), the highest first: single counts, or as many as can be sorted at once."""
        histogram: Counter[int] = Counter()
        for run, start, stop in self._blocks(chunk):
            values, rows = np.unique(run.read_counts(start, stop), return_counts=True)
            histogram.update(dict(zip(values.tolist(), rows.tolist(), strict=True)))
        bands: list[tuple[int, int]] = []
        seen = held = 0
        for value in sorted(histogram, reverse=True):
            if seen >= number:
                break
            if bands and held + histogram[value] <= SORTED_CHUNKS * chunk:
                bands[-1] = (value, bands[-1][1])
                held += histogram[value]
            else:
                bands.append((value, value))
                held = histogram[value]
            seen += histogram[value]
        return bands

    def _between(self, least: int, most: int, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for run, start, stop in self._blocks(chunk):
            counts = run.read_counts(start, stop)
            chosen = np.flatnonzero((counts >= np.uint64(least)) & (counts <= np.uint64(most)))
            if len(chosen):
                yield run.read_keys(start, stop)[chosen], counts[chosen]

    def _blocks(self, chunk: int) -> Iterator[tuple[Run, int, int]]:
        for level in reversed(range(len(self.levels))):
            for start in range(0, self.levels[level], chunk):
                yield self.run(level), start, min(start + chunk, self.levels[level])


def level_run(folder: Path, level: int, space: KeySpace) -> Run:
    return Run(folder / f"keys-{level}", folder / f"counts-{level}", space.words)


def _rechunked(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    held: list[np.ndarray] = []
    rows = 0
    for array in arrays:
        held.append(array)
        rows += len(array)
        if rows >= size:
            together = np.concatenate(held)
            whole = rows - rows % size
            yield from (together[start : start + size] for start in range(0, whole, size))
            held, rows = [together[whole:]], rows - whole
    if rows:
        yield np.concatenate(held)
