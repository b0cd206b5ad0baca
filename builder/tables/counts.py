"""The number of times that each n-gram of a corpus occurs, whole windows and shorter forms.

    meta.json         the vocabulary, the window, the corpus' size, and how many distinct n-grams each level has
    keys-<level>      uint64, rows x words, sorted; level 0 are whole windows, then come the shorter forms (`Window.levels`)
    counts-<level>    uint64, how many windows are of this form once shrunken to it

Each form is in one level, the deepest it fits in: a text's first token has nothing before it to lose. A decoder computes the
windows that no table has, so its shorter forms are only those that begin texts. A corpus of any size is counted in bounded
memory. Pieces of it become sorted runs, and the runs are merged, so many at a time. Shorter forms need no second look at the
text: they are the merged windows, masked, as the next level's runs.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from builder.console import progress_bar, say_costs
from builder.store.resumable import META, read_json, write_json
from builder.tables.corpus import Corpus
from builder.tables.sorted_runs import Rows, Run, merged, narrowed, row_bytes, rows_in, runs_folder, summed
from hplm.clock import Clock
from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace

BLOCK = 1 << 20  # rows that are read at once to find the most frequent ones
MEMORY = 512 << 20  # bytes that counting takes
TIMED = 200_000  # tokens that are counted to tell how long all take


class Counts:
    def __init__(self, folder: Path) -> None:
        meta = read_json(folder / META, InvalidInput, "build its branch again, with --corpus")
        self.folder = folder
        self.tokens: int = meta["tokens"]
        self.documents: int = meta["documents"]
        self.space = KeySpace(meta["vocabulary"], Window(meta["n"], meta["causal"]))
        self.levels: list[int] = meta["distinct"]
        for level, rows in enumerate(self.levels):
            self.run(level).check(rows)

    def run(self, level: int) -> Run:
        return Run(self.folder, str(level), self.space.words)

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


def count_ngrams(corpus: Corpus, space: KeySpace, folder: Path, memory: int = MEMORY, clock: Clock = time) -> Counts:
    """Counts a corpus. A call after an interruption continues with the missing runs and levels."""
    runs = runs_folder(folder, memory)
    if not (folder / META).exists() and not runs.exists() and any(folder.glob("keys-*")):  # the next level needs these runs
        shutil.rmtree(folder)

    def piece(level: int, number: int) -> Run:
        return Run(runs, f"{level}-{number}", space.words)

    def count(level: int) -> Sequence[Run]:
        if level == 0:
            most = f"at most {most_bytes(corpus.tokens, space) / 1e9:,.2f}"
            say_costs(f"counting {corpus.tokens:,} tokens", _seconds(corpus, space, clock), most, folder)
            _count_pieces(corpus, space, partial(piece, 0), memory)
        return [*map(partial(piece, level), range(len(list(runs.glob(f"keys-{level}-[0-9]*")))))]

    def shorten(level: int, blocks: Iterable[Rows]) -> Iterator[Rows]:
        """Yields the rows that have shorter forms, which become runs of the next level."""
        if level + 1 == len(space.masks):
            yield from blocks
            return
        written, shorter = itertools.count(), list[Rows]()

        def write_piece() -> None:
            piece(level + 1, next(written)).write([summed(*map(np.concatenate, zip(*shorter, strict=True)))])
            shorter.clear()

        for keys, counts in blocks:
            short = keys & space.masks[level + 1]
            own = np.any(short != keys, axis=1)
            passed = ~own if space.window.causal else slice(None)
            shorter.append((short[passed], counts[passed]))
            if sum(len(short) for short, _ in shorter) > rows_in(memory, space.words) // 2:
                write_piece()
            yield keys[own], counts[own]
        if shorter:
            write_piece()

    return _merged(folder, space, corpus.tokens, len(corpus), memory, count, shorten)


def add_counts(parts: Sequence[Counts], folder: Path, memory: int = MEMORY) -> Counts:
    """Adds counts of one store: the result is as if the corpora of all parts had been counted together."""
    sums = sum(part.tokens for part in parts), sum(part.documents for part in parts)
    return _merged(folder, parts[0].space, *sums, memory, lambda level: [part.run(level) for part in parts])


def _merged(
    folder: Path, space: KeySpace, tokens: int, documents: int, memory: int, runs_of: Callable[[int], Sequence[Run]],
    kept: Callable[[int, Iterable[Rows]], Iterable[Rows]] = lambda level, blocks: blocks,
) -> Counts:  # fmt: skip
    """Merges the runs of each level, and returns the counts. A level whose keys are there is complete.

    `kept`: the rows of a merged level that stay in it.
    """
    if (folder / META).exists():
        return Counts(folder)
    (scratch := runs_folder(folder, memory)).mkdir(parents=True, exist_ok=True)

    def made(level: int, number: int) -> Run:
        return Run(scratch, f"{level}-merged-{number}", space.words)

    levels = [Run(folder, str(level), space.words) for level in range(len(space.masks))]
    for level, whole in enumerate(levels):
        if whole.keys.exists():
            continue
        for passed in scratch.glob(f"*s-{level - 1}-*"):
            passed.unlink()
        runs = narrowed(runs_of(level), partial(made, level), memory)
        title, rows = f"merging n-grams, level {level}", sum(run.rows for run in runs)
        with progress_bar(title=title, total=rows, unit="n-gram", unit_scale=True) as bar:
            whole.write(kept(level, merged(runs, memory, bar.update)))
    for runs in folder.glob("runs*"):
        shutil.rmtree(runs)
    window, distinct = space.window, [level.rows for level in levels]
    meta = {"vocabulary": space.vocabulary, "n": window.n, "causal": window.causal, "tokens": tokens, "documents": documents}
    write_json(folder / META, {**meta, "distinct": distinct})
    return Counts(folder)


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


def _count_pieces(corpus: Corpus, space: KeySpace, piece: Callable[[int], Run], memory: int) -> None:
    with progress_bar(title="counting n-grams", total=corpus.tokens, unit="token", unit_scale=True) as bar:
        for number, (tokens, lengths) in enumerate(corpus.pieces(rows_in(memory, space.words))):
            if not (run := piece(number)).keys.exists():
                keys = space.of(tokens, lengths)
                run.write([summed(keys, np.ones(len(keys), dtype=np.uint64))])
            bar.update(len(tokens))
