"""Computes how much of a text a branch's table covers, and how much a smaller table would cover.

A table with a smaller `keep` has the most frequent of this one's n-grams. The places of the text's own n-grams, by frequency,
give the coverage of every smaller table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from builder.options import check_keep
from builder.store.store import Store
from builder.tables.counts import Counts
from builder.tables.ranking import Ranking
from builder.tables.sorted_runs import distinct
from builder.tables.table import table_bytes
from builder.tasks.examples import read_corpus
from hplm.errors import InvalidInput
from hplm.plot.forest import Chain
from hplm.plot.levels import count_levels, ends
from hplm.plot.table import TableMeta

TEXT_TOKENS = 5_000_000
USUAL_KEEPS = (1.0, 0.004, 0.001, 0.0)  # HMI, Table 5
CURVE_POINTS = 60
BATCH_DOCUMENTS = 500


@dataclass(frozen=True)
class Kept:
    """A table of this branch with another `keep`, and the shares of a text's windows that are found where."""

    keep: float
    ngrams: int
    fp16_bytes: int
    int8_bytes: int
    here: float  # the whole window, in this table
    above: float  # the whole window, in a parent or the root
    shorter: dict[str, float]


@dataclass(frozen=True)
class Curve:
    """Shares of a text's windows by table size, the smallest table first."""

    bytes: list[int]
    here: list[float]
    within: dict[str, list[float]]  # by level: found in any table of the chain with at least so many tokens


@dataclass(frozen=True)
class Coverage:
    tokens: int
    cut: bool  # the text was longer than what was read
    levels: dict[str, float]  # of the actual table
    kept: list[Kept]
    curve: Curve


def cover(
    store: Store,
    domain: str,
    version: int,
    text: Path,
    keeps: Sequence[float] | None = None,
    progress: Callable[[int], object] | None = None,
    most_tokens: int = TEXT_TOKENS,
) -> Coverage:
    """Looks a text up. `keeps`: default are those of HMI's Table 5 that this table includes, and its own."""
    chain = store.forest(domain, version).chain(domain, version)
    smaller = _Smaller(chain.links[0][0].meta, Counts(store.counts_folder(domain, version)))
    keeps = smaller.usual_keeps() if keeps is None else keeps
    for keep in keeps:
        smaller.check(keep)
    steps = np.unique([0.0, *np.geomspace(smaller.keep / max(1, smaller.meta.keys), smaller.keep, CURVE_POINTS), *keeps])
    steps = steps[[smaller.holds(keep) for keep in steps.tolist()]]
    tokens, cut, looked, windows = 0, False, np.zeros(len(chain.space.masks) * len(chain.links), dtype=np.int64), []
    for piece, lengths in _read_pieces(store, text, progress):
        if cut := tokens >= most_tokens:
            break
        tokens += len(piece)
        looked += ends(chain, chain.lookup(piece, lengths))
        windows.append(chain.space.of(piece, lengths))
    here, within = _found(chain, smaller, steps, np.concatenate(windows))
    names = [f"{tokens}-gram" for tokens in chain.space.window.levels().sum(1).tolist()]
    kept = []
    for keep in keeps:
        step, ngrams = int(np.searchsorted(steps, keep)), smaller.ranking.size(keep)
        shorter = {name: float(within[i, step] - within[i - 1, step]) for i, name in enumerate(names) if i}
        fp16, int8 = (table_bytes(smaller.meta, ngrams, dtype) for dtype in ("fp16", "int8"))
        own = float(here[step])
        kept.append(Kept(keep, ngrams, fp16, int8, own, float(within[0, step]) - own, shorter))
    sizes = [table_bytes(smaller.meta, smaller.ranking.size(keep), smaller.meta.dtype) for keep in steps.tolist()]
    curve = Curve(sizes, here.tolist(), {name: within[i].tolist() for i, name in enumerate(names)})
    levels = {name: int(count) / tokens for name, count in count_levels(chain, looked).items()}
    return Coverage(tokens, cut, levels, kept, curve)


class _Smaller:
    """The smaller tables of a branch: the most frequent n-grams of each level. A root's have all single tokens."""

    def __init__(self, meta: TableMeta, counts: Counts) -> None:
        self.meta, self._counts = meta, counts
        self.ranking = Ranking(counts, root=meta.parent is None)
        self.keep = self.ranking.keep_of(meta)  # of the table itself

    def holds(self, keep: float) -> bool:
        """Returns whether the table has all n-grams of one with this `keep`."""
        return self.ranking.size(keep) <= self.meta.keys

    def check(self, keep: float) -> None:
        check_keep(keep)
        if not self.holds(keep):
            raise InvalidInput(
                f"keep {keep:g} is {self.ranking.size(keep):,} n-grams, and the table of {self.meta.domain!r} has "
                f"{self.meta.keys:,}: choose less, or build it with more --keep"
            )

    def usual_keeps(self) -> list[float]:
        by_size = {self.ranking.size(keep): keep for keep in (self.keep, *USUAL_KEEPS)}
        return [keep for keep in by_size.values() if self.holds(keep)]

    def first_with(self, keys: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns for each of sorted keys the first of the tables with these `keep`s that has it; their number if none has."""
        found, masks = np.full(len(keys), len(steps)), self._counts.space.masks
        fits = [((keys & mask) == keys).all(1) for mask in masks]
        level_of = np.sum(fits, axis=0) - 1  # the deepest one
        taken = np.array([self.ranking.taken(keep) for keep in steps.tolist()])
        for level in range(len(masks)):
            own = np.flatnonzero(level_of == level)
            places = self._counts.places(level, keys[own])
            found[own] = np.where(places < 0, len(steps), np.searchsorted(taken[:, level], places, side="right"))
        if self.ranking.root:
            found[((keys & masks[-1]) == keys).all(1)] = 0
        return found


def _found(chain: Chain, smaller: _Smaller, steps: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns by table the share of windows that it has whole, and by level and table those found anywhere at this level."""
    keys, window_of = distinct(windows)
    times = np.bincount(window_of, minlength=len(keys))
    least, here, within = np.full(len(keys), len(steps)), np.zeros(len(steps)), []

    def shares(first: np.ndarray) -> np.ndarray:
        return np.cumsum(np.bincount(first, times, len(steps) + 1)[:-1]) / len(windows)

    for level, mask in enumerate(chain.space.masks):
        shrunken, which = distinct(keys & mask)
        first = smaller.first_with(shrunken, steps)
        if level == 0:
            here = shares(first[which])
        for table, _ in chain.links[1:]:
            first[table.find(shrunken) > 0] = 0
        least = np.minimum(least, first[which])
        within.append(shares(least))
    return here, np.array(within)


def _read_pieces(store: Store, text: Path, progress: Callable[[int], object] | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a text a few documents at a time, read like a corpus."""
    tokenizer, documents = store.tokenizer(), read_corpus([text], progress)
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode_documents(batch)
        yield np.concatenate(encoded), np.array([len(document) for document in encoded])
