"""Sorted runs of distinct keys with their counts on disk, and merging many runs with bounded memory and few reads."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builder.console import progress_bar
from builder.store.resumable import replaced
from hplm.errors import Broken
from hplm.plot.keys import first_of_each, order

BYTES = 8  # of one word of a key, and of one count
WIDTH = 64  # the most runs that are read side by side: more would take smaller reads

Rows = tuple[np.ndarray, np.ndarray]  # keys and their counts
Key = tuple[int, ...]


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

    def write(self, blocks: Iterable[Rows]) -> None:
        """Counts get their name before keys: a run with keys is complete."""
        with (
            replaced(self.keys) as keys,
            replaced(self.counts) as counts,
            open(keys, "wb") as first,
            open(counts, "wb") as second,
        ):
            for block in blocks:
                for rows, file in zip(block, (first, second), strict=True):
                    rows.tofile(file)

    def empty(self) -> None:
        """Frees its space. It stays as a run that was written."""
        for path in (self.keys, self.counts):
            os.truncate(path, 0)

    def check(self, rows: int) -> None:
        for path, width in ((self.keys, self.words), (self.counts, 1)):
            expected, size = rows * width * BYTES, path.stat().st_size
            if size != expected:
                raise Broken(f"{path} has {size} bytes, not {expected}: build its branch again")


def runs_folder(folder: Path, memory: int) -> Path:
    """Returns where the runs of unfinished counts are. With another memory or width they have other rows."""
    return folder / f"runs-{memory}-{WIDTH}"


def row_bytes(words: int) -> int:
    """Returns the bytes of a key and its count on disk."""
    return BYTES * (words + 1)


def rows_in(memory: int, words: int) -> int:
    """Returns how many rows can be summed at once: key, count and position of each, and the copies that sorting makes."""
    return max(1, memory // (BYTES * (4 * words + 8)))


def summed(keys: np.ndarray, counts: np.ndarray) -> Rows:
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


class RunReader:
    """Reads a run from its first row to its last, so many at once."""

    def __init__(self, run: Run, rows: int) -> None:
        self._run, self._rows, self._read, self._all = run, rows, 0, run.rows
        self._keys, self._counts = run.read_keys(0, 0), run.read_counts(0, 0)

    def fill(self) -> bool:
        """Reads the next rows once all were taken. Returns whether there are any."""
        if not len(self._keys) and self._read < self._all:
            start, self._read = self._read, min(self._read + self._rows, self._all)
            self._keys, self._counts = self._run.read_keys(start, self._read), self._run.read_counts(start, self._read)
        return len(self._keys) > 0

    @property
    def known(self) -> Key | None:
        """The last key that was read. No later one is smaller. None: all are read."""
        return self._key(-1) if self._read < self._all else None

    def take(self, until: Key | None) -> Rows:
        """Returns the rows with keys up to this one, without those that were taken before. None: all that were read."""
        end = len(self._keys) if until is None else bisect_right(range(len(self._keys)), until, key=self._key)
        taken = self._keys[:end], self._counts[:end]
        self._keys, self._counts = self._keys[end:], self._counts[end:]
        return taken

    def _key(self, row: int) -> Key:
        return tuple(self._keys[row].tolist())


def merged(runs: Sequence[Run], memory: int, progress: Callable[[int], object]) -> Iterator[Rows]:
    """Yields all rows in order, each key once, in blocks that fit the memory. The same runs and memory give the same blocks."""
    readers = [RunReader(run, max(1, rows_in(memory, run.words) // (2 * len(runs)))) for run in runs]
    while readers := [reader for reader in readers if reader.fill()]:
        until = min((known for reader in readers if (known := reader.known) is not None), default=None)
        keys, counts = zip(*[reader.take(until) for reader in readers], strict=True)
        progress(sum(map(len, counts)))
        yield summed(np.concatenate(keys), np.concatenate(counts))


def narrowed(runs: Sequence[Run], made: Callable[[int], Run], memory: int) -> Sequence[Run]:
    """Returns `WIDTH` runs at most, with the rows of these. Each pass over all rows divides the number of runs by `WIDTH`.

    `made`: a run by number, as all that are merged before. Runs of its folder are emptied once they are merged. A call after
    an interruption goes on.
    """
    queue, first = [*runs], 0
    while (left := len(queue) - first) > WIDTH:
        group = queue[first : first + min(WIDTH, left - WIDTH + 1)]
        queue.append(whole := made(len(queue)))
        if not whole.keys.exists():
            title = f"merging runs {first + 1:,} to {first + len(group):,}"
            with progress_bar(
                title=title, total=sum(run.rows for run in group), unit="n-gram", unit_scale=True, leave=False
            ) as bar:
                whole.write(merged(group, memory, bar.update))
        for run in group:
            if run.folder == whole.folder:
                run.empty()
        first += len(group)
    return queue[first:]
