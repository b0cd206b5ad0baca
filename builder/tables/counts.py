"""The number of times that each n-gram of a corpus occurs, whole windows and shorter forms.

    meta.json         the vocabulary, the window, the corpus' size, and how many distinct n-grams each level has
    keys-<level>      uint64, rows x words, sorted; level 0 are whole windows, then come the shorter forms (`Window.levels`)
    counts-<level>    uint64, how many windows are of this form once shrunken to it

Each form is in one level, the deepest it fits in: a text's first token has nothing before it to lose. A corpus of any size is
counted in bounded memory. Pieces of it become sorted runs, and the runs are merged. Shorter forms need no second look at the
text: they are the merged windows, masked, as the next level's runs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from builder.said import progress_bar, say_costs
from builder.store.resumable import META, ResumableFiles, is_finished, read_json
from builder.tables.corpus import Corpus
from builder.tables.sorted_runs import Merge, Run, row_bytes, rows_in, summed
from hplm.clock import Clock
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace

BLOCK = 1 << 20  # rows that are read at once to find the most frequent ones
MEMORY = 512 << 20  # bytes that counting takes
TIMED = 200_000  # tokens that are counted to tell how long all take


class Counts:
    def __init__(self, folder: Path) -> None:
        meta = read_json(folder / META, InvalidInput, "count a corpus into this folder first")
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

    def most_frequent(self, level: int, number: int) -> np.ndarray:
        """Returns the `number` most frequent keys of a level, of equally frequent ones the smaller first."""
        run, block = self.run(level), max(number, BLOCK)
        keys, counts = run.read_keys(0, 0), run.read_counts(0, 0)
        for start in range(0, run.rows, block):
            stop = min(start + block, run.rows)
            keys = np.concatenate([keys, run.read_keys(start, stop)])
            counts = np.concatenate([counts, run.read_counts(start, stop)])
            first = np.argsort(-counts.astype(np.int64), kind="stable")[:number]
            keys, counts = keys[first], counts[first]
        return keys


def level_run(folder: Path, level: int, space: KeySpace) -> Run:
    return Run(folder / f"keys-{level}", folder / f"counts-{level}", space.words)


def count_ngrams(corpus: Corpus, space: KeySpace, folder: Path, memory: int = MEMORY, clock: Clock = time) -> Counts:
    """Counts a corpus. A call after an interruption continues with the missing runs and partitions."""
    meta = _meta(space, corpus.tokens, len(corpus))
    if is_finished(folder, meta):
        return Counts(folder)
    with _growing(folder, space, meta, memory) as growing:
        if growing.done["level"] == 0:
            most = f"at most {most_bytes(corpus.tokens, space) / 1e9:,.2f}"
            say_costs(f"counting {corpus.tokens:,} tokens", _seconds(corpus, space, clock), most, folder)
            _count_pieces(corpus, space, folder, memory)
        for level in range(growing.done["level"], len(space.masks)):
            runs = _runs(folder, level, space)
            for partition, keys, counts in _merged(growing, level, runs, memory):
                if level + 1 < len(space.masks):
                    shorter = keys & space.masks[level + 1]
                    _run(folder, level + 1, partition, space).write(*summed(shorter, counts))
                    own = np.any(shorter != keys, axis=1)
                    keys, counts = keys[own], counts[own]
                _append(growing, level, partition, keys, counts)
            growing.record(level=level + 1, partition=0)
            for run in runs:
                run.remove()
        if (folder / "runs").exists():
            shutil.rmtree(folder / "runs")
        return _finished(growing, space, meta)


def add_counts(parts: Sequence[Counts], folder: Path, memory: int = MEMORY) -> Counts:
    """Adds counts: the result is as if the corpora of all parts had been counted together."""
    space = parts[0].space
    for part in parts:
        if part.space != space:
            named = f"{part.folder} counts {_named(part.space)}, {parts[0].folder} {_named(space)}"
            raise InvalidInput(f"{named}: only counts of the same n-grams can be added")
    meta = _meta(space, sum(part.tokens for part in parts), sum(part.documents for part in parts))
    if is_finished(folder, meta):
        return Counts(folder)
    with _growing(folder, space, meta, memory) as growing:
        for level in range(growing.done["level"], len(space.masks)):
            runs = [part.run(level) for part in parts]
            for partition, keys, counts in _merged(growing, level, runs, memory):
                _append(growing, level, partition, keys, counts)
            growing.record(level=level + 1, partition=0)
        return _finished(growing, space, meta)


def most_bytes(tokens: int, space: KeySpace) -> int:
    """Returns the disk space that counting takes at most: two levels as runs, and each level as it is kept."""
    return (len(space.masks) + 1) * tokens * row_bytes(space.words)


def _seconds(corpus: Corpus, space: KeySpace, clock: Clock) -> float:
    """Returns how long counting may take here, from a part of the corpus, whose levels are sorted as runs and as merged."""
    if not corpus.tokens:
        return 0.0
    started, (tokens, lengths) = clock.monotonic(), next(corpus.pieces(min(TIMED, corpus.tokens // 10)))
    keys = space.of(tokens, lengths)
    counts = np.ones(len(keys), dtype=np.uint64)
    for mask in space.masks:
        keys, counts = summed(*summed(keys & mask, counts))
    return (clock.monotonic() - started) * corpus.tokens / max(1, len(tokens))


def _count_pieces(corpus: Corpus, space: KeySpace, folder: Path, memory: int) -> None:
    (folder / "runs").mkdir(exist_ok=True)
    with progress_bar(title="counting n-grams", total=corpus.tokens, unit="token", unit_scale=True) as bar:
        for number, (tokens, lengths) in enumerate(corpus.pieces(rows_in(memory, space.words))):
            run = _run(folder, 0, number, space)
            if not run.keys.exists():
                if (highest := tokens.max(initial=0)) >= space.vocabulary:
                    raise InvalidInput(f"{corpus.folder} holds token {highest}, the vocabulary {space.vocabulary}: tokenise it")
                keys = space.of(tokens, lengths)
                run.write(*summed(keys, np.ones(len(keys), dtype=np.uint64)))
            bar.update(len(tokens))


def _merged(
    growing: ResumableFiles, level: int, runs: Sequence[Run], memory: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (number, keys, counts) of the partitions of a level that are not recorded yet."""
    merge, first = Merge(runs, memory), growing.done["partition"]
    rows, done = merge.rows(0, merge.partitions), merge.rows(0, first)
    title = f"merging n-grams, level {level}"
    with progress_bar(title=title, total=rows, initial=done, unit="n-gram", unit_scale=True) as bar:
        for partition in range(first, merge.partitions):
            yield partition, *merge.read(partition)
            bar.update(merge.rows(partition, partition + 1))


def _growing(folder: Path, space: KeySpace, meta: dict, memory: int) -> ResumableFiles:
    names = [f"{part}-{level}" for level in range(len(space.masks)) for part in ("keys", "counts")]
    return ResumableFiles(folder, names, meta | {"memory": memory}, {"level": 0, "partition": 0})


def _append(growing: ResumableFiles, level: int, partition: int, keys: np.ndarray, counts: np.ndarray) -> None:
    growing.append(f"keys-{level}", keys)
    growing.append(f"counts-{level}", counts)
    growing.record(partition=partition + 1)


def _finished(growing: ResumableFiles, space: KeySpace, meta: dict) -> Counts:
    distinct = [level_run(growing.folder, level, space).rows for level in range(len(space.masks))]
    growing.finish(meta | {"distinct": distinct})
    return Counts(growing.folder)


def _meta(space: KeySpace, tokens: int, documents: int) -> dict:
    window = space.window
    return {"vocabulary": space.vocabulary, "n": window.n, "causal": window.causal, "tokens": tokens, "documents": documents}


def _named(space: KeySpace) -> str:
    return f"{'causal ' if space.window.causal else ''}{space.window.n}-grams of {space.vocabulary} tokens"


def _run(folder: Path, level: int, number: int, space: KeySpace) -> Run:
    return Run(folder / "runs" / f"keys-{level}-{number}", folder / "runs" / f"counts-{level}-{number}", space.words)


def _runs(folder: Path, level: int, space: KeySpace) -> list[Run]:
    number = len(list((folder / "runs").glob(f"keys-{level}-*[0-9]")))
    return [_run(folder, level, i, space) for i in range(number)]
