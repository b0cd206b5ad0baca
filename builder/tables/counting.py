"""Counts the n-grams of a corpus of any size in bounded memory.

Pieces of the corpus become sorted runs, and the runs are merged. Shorter forms need no second look at the text: they are the
merged windows, masked, as the next level's runs. A form that two levels share (a text's first token has nothing before it to
lose) belongs to the deeper one.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from builder.store.resumable import ResumableFiles, is_finished
from builder.tables.corpus import Corpus
from builder.tables.counts import Counts, level_run
from builder.tables.sorted_runs import Merge, Run, row_bytes, rows_in, summed
from hplm.errors import InvalidInput
from hplm.plot.keys import KeySpace

MEMORY = 512 << 20


def count_ngrams(corpus: Corpus, space: KeySpace, folder: Path, memory: int = MEMORY, show_progress: bool = True) -> Counts:
    """Counts a corpus. A call after an interruption continues with the missing runs and partitions."""
    meta = _meta(space, corpus.tokens, len(corpus))
    if is_finished(folder, meta):
        return Counts(folder)
    with _growing(folder, space, meta, memory) as growing:
        if growing.done["level"] == 0:
            _say_room(corpus.tokens, space, folder)
            _count_pieces(corpus, space, folder, memory, show_progress)
        for level in range(growing.done["level"], len(space.masks)):
            runs = _runs(folder, level, space)
            for partition, keys, counts in _merged(growing, level, runs, memory, show_progress):
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


def add_counts(parts: Sequence[Counts], folder: Path, memory: int = MEMORY, show_progress: bool = True) -> Counts:
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
            for partition, keys, counts in _merged(growing, level, runs, memory, show_progress):
                _append(growing, level, partition, keys, counts)
            growing.record(level=level + 1, partition=0)
        return _finished(growing, space, meta)


def most_bytes(tokens: int, space: KeySpace) -> int:
    """Returns the disk space that counting takes at most: two levels as runs, and each level as it is kept."""
    return (len(space.masks) + 1) * tokens * row_bytes(space.words)


def _say_room(tokens: int, space: KeySpace, folder: Path) -> None:
    most, free = most_bytes(tokens, space), shutil.disk_usage(folder).free
    said = f"counting {tokens:,} tokens: takes at most {most / 1e9:,.2f} GB on the disk, which has {free / 1e9:,.2f} GB free"
    print(said, file=sys.stderr, flush=True)


def _count_pieces(corpus: Corpus, space: KeySpace, folder: Path, memory: int, show_progress: bool) -> None:
    (folder / "runs").mkdir(exist_ok=True)
    with tqdm(total=corpus.tokens, desc="counting n-grams", unit="token", unit_scale=True, disable=not show_progress) as bar:
        for number, (tokens, lengths) in enumerate(corpus.pieces(rows_in(memory, space.words))):
            run = _run(folder, 0, number, space)
            if not run.keys.exists():
                if (highest := tokens.max(initial=0)) >= space.vocabulary:
                    raise InvalidInput(f"{corpus.folder} holds token {highest}, the vocabulary {space.vocabulary}: tokenise it")
                keys = space.of(tokens, lengths)
                run.write(*summed(keys, np.ones(len(keys), dtype=np.uint64)))
            bar.update(len(tokens))


def _merged(
    growing: ResumableFiles, level: int, runs: Sequence[Run], memory: int, show_progress: bool
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (number, keys, counts) of the partitions of a level that are not recorded yet."""
    merge, first = Merge(runs, memory), growing.done["partition"]
    rows, done = merge.rows(0, merge.partitions), merge.rows(0, first)
    title = f"merging n-grams, level {level}"
    with tqdm(total=rows, initial=done, desc=title, unit="n-gram", unit_scale=True, disable=not show_progress) as bar:
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
