"""Sorted runs of distinct keys with their counts on disk, and merging many runs in bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builder.store.resumable import replaced
from hplm.errors import Broken
from hplm.plot.keys import first_of_each, order

BYTES = 8  # of one word of a key, and of one count


@dataclass(frozen=True)
class Run:
    """A sorted run on disk. Rows are read, not mapped: mapped pages would count as memory of the process."""

    folder: Path
    name: str
    words: int

    @property
    def keys(self) -> Path:
        return self.folder / f"keys-{self.name}"

    @property
    def counts(self) -> Path:
        return self.folder / f"counts-{self.name}"

    @property
    def rows(self) -> int:
        return self.counts.stat().st_size // BYTES

    def read_keys(self, start: int, stop: int) -> np.ndarray:
        words = np.fromfile(self.keys, np.uint64, (stop - start) * self.words, offset=start * self.words * BYTES)
        return words.reshape(-1, self.words)

    def read_counts(self, start: int, stop: int) -> np.ndarray:
        return np.fromfile(self.counts, np.uint64, stop - start, offset=start * BYTES)

    def key(self, row: int) -> tuple[int, ...]:
        return tuple(self.read_keys(row, row + 1)[0].tolist())

    def find(self, key: tuple[int, ...]) -> int:
        """Returns the first row whose key is not smaller than `key`."""
        return bisect_left(range(self.rows), key, key=self.key)

    @contextmanager
    def growing(self) -> Iterator[Callable[[np.ndarray, np.ndarray], None]]:
        """Appends rows to it. Counts get their name before keys: a run with keys is complete."""
        with (
            replaced(self.keys) as keys,
            replaced(self.counts) as counts,
            open(keys, "wb") as first,
            open(counts, "wb") as second,
        ):

            def append(keys: np.ndarray, counts: np.ndarray) -> None:
                keys.tofile(first)
                counts.tofile(second)

            yield append

    def write(self, keys: np.ndarray, counts: np.ndarray) -> None:
        with self.growing() as append:
            append(keys, counts)

    def check(self, rows: int) -> None:
        for path, width in ((self.keys, self.words), (self.counts, 1)):
            expected, size = rows * width * BYTES, path.stat().st_size
            if size != expected:
                raise Broken(f"{path} has {size} bytes, not {expected}: build its branch again")


def row_bytes(words: int) -> int:
    """Returns the bytes of a key and its count on disk."""
    return BYTES * (words + 1)


def rows_in(memory: int, words: int) -> int:
    """Returns how many rows can be summed at once: key, count and position of each, and the copies that sorting makes."""
    return max(1, memory // (BYTES * (4 * words + 8)))


def summed(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each key once, in order, with the sum of its counts."""
    if not len(keys):
        return keys, counts
    by_key = order(keys)
    keys, counts = keys[by_key], counts[by_key]
    first = first_of_each(keys)
    return keys[first], np.add.reduceat(counts, first)


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct keys in order, and the index of each key among them."""
    by_key = order(keys)
    starts = first_of_each(keys[by_key])
    which = np.empty(len(keys), dtype=np.int64)
    which[by_key] = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(keys))))
    return keys[by_key[starts]], which


class Merge:
    """Merges runs partition by partition, so that each fits the memory. The same runs and memory give the same partitions."""

    def __init__(self, runs: Sequence[Run], memory: int) -> None:
        self._runs = [run for run in runs if run.rows]
        splitters = self._splitters(memory) if self._runs else []
        self._cuts = [[0, *map(run.find, splitters), run.rows] for run in self._runs]
        self.partitions = len(splitters) + 1 if self._runs else 0

    def _splitters(self, memory: int) -> list[tuple[int, ...]]:
        """Returns every R-th of the sampled keys of R runs.

        Between two of them lie fewer than 2 R samples (each run may have sampled the same key), a step of rows after each at
        most, and in each run less than a step before its first: 3 R steps, which fit the memory.
        """
        runs = len(self._runs)
        step = max(1, rows_in(memory, self._runs[0].words) // (3 * runs))
        samples = sorted(run.key(row) for run in self._runs for row in range(0, run.rows, step))
        return samples[runs::runs]

    def rows(self, first: int, last: int) -> int:
        """Returns the number of rows in the partitions from `first` up to, not including, `last`."""
        return sum(cuts[last] - cuts[first] for cuts in self._cuts)

    def read(self, partition: int) -> tuple[np.ndarray, np.ndarray]:
        slices = [(run, *cuts[partition : partition + 2]) for run, cuts in zip(self._runs, self._cuts, strict=True)]
        keys = np.concatenate([run.read_keys(start, stop) for run, start, stop in slices])
        return summed(keys, np.concatenate([run.read_counts(start, stop) for run, start, stop in slices]))
