"""Computes how much of a text a branch's table covers, and how much a smaller table would cover.

A table with a smaller `keep` has the first of this one's n-grams. One look-up of a text, with the place of each window in
their order, gives the coverage of every smaller table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from builder.store.store import Store
from builder.tables.counts import Counts
from builder.tables.ranking import Ranking
from builder.tables.table import table_bytes
from builder.tasks.examples import read_corpus
from hplm.errors import InvalidInput
from hplm.plot.forest import Chain
from hplm.plot.levels import count_levels, ends
from hplm.plot.table import Table

TEXT_TOKENS = 5_000_000
USUAL_KEEPS = (1.0, 0.004, 0.001, 0.0)  # HMI, Table 5
CURVE_POINTS = 60
BATCH_DOCUMENTS = 500
NOWHERE = np.iinfo(np.int64).max
ALWAYS = 0  # found in a table of any size


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
    prefix = Prefix(chain.links[0][0], Counts(store.counts_folder(domain, version)))
    numbers = {keep: prefix.number(keep) for keep in (prefix.usual_keeps() if keeps is None else keeps)}
    curve = np.geomspace(1, max(1, prefix.rows), CURVE_POINTS).astype(np.int64)
    steps = np.unique(np.concatenate([[0], curve, np.array(list(numbers.values()), dtype=np.int64)]))
    steps = steps[steps <= prefix.rows]
    found = _Found(chain, prefix, steps)
    cut = False
    for tokens, lengths in _read_pieces(store, text, progress):
        if found.tokens >= most_tokens:
            cut = True
            break
        found.add(tokens, lengths)
    return found.coverage(numbers, cut)


class Prefix:
    """The smaller tables of a branch: the first n-grams of its ranking. Of a root, each of them holds all single tokens.

    An n-gram's place is not its row: tables of earlier versions have their rows in another order.
    """

    def __init__(self, table: Table, counts: Counts) -> None:
        self.meta = table.meta
        self._table = table
        self._ranking = Ranking(counts, root=table.meta.parent is None)
        self._places = np.full(table.size, NOWHERE)  # by row, the first is 1
        self.rows = self._find_places(counts.distinct)  # of the largest smaller table: this one has all of its n-grams
        if self._ranking.root:
            self._alone = np.sort(self._places[table.find(table.space.unigrams())])

    def _find_places(self, distinct: int) -> int:
        first = 1
        for keys in self._ranking.keys(distinct):
            rows = self._table.find(keys)
            held = np.flatnonzero(rows)
            self._places[rows[held]] = first + held
            if len(held) < len(keys):
                return first - 1 + int((rows == 0).argmax())
            first += len(keys)
        return first - 1

    def number(self, keep: float) -> int:
        number = self._ranking.number(keep)
        if number > self.rows:
            raise InvalidInput(
                f"keep {keep:g} is {number:,} n-grams, of which the table of {self.meta.domain!r} has the first {self.rows:,}: "
                "choose less, or build it with more --keep"
            )
        return number

    def usual_keeps(self) -> list[float]:
        keeps = (self._ranking.keep_of(self.meta), *USUAL_KEEPS)
        by_size = {self._ranking.number(keep): keep for keep in keeps}
        return [keep for number, keep in by_size.items() if number <= self.rows]

    def ngrams(self, number: int) -> int:
        """Returns how many n-grams the table of the `number` most frequent has."""
        if not self._ranking.root:
            return number
        return number + len(self._alone) - int(np.searchsorted(self._alone, number, side="right"))

    def least_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns, for each key, how many rows a table needs to hold it."""
        least = self._places[self._table.find(keys)]
        if self._ranking.root:
            least[((keys & self._table.space.masks[-1]) == keys).all(1)] = ALWAYS
        return least


class _Found:
    """Counts the windows of a text that are found in tables of `steps` rows."""

    def __init__(self, chain: Chain, prefix: Prefix, steps: np.ndarray) -> None:
        self._chain, self._prefix, self._steps = chain, prefix, steps
        self.tokens = 0
        self._ends = np.zeros(len(chain.space.masks) * len(chain.links), dtype=np.int64)
        self._here = np.zeros(len(steps), dtype=np.int64)
        self._within = np.zeros((len(chain.space.masks), len(steps)), dtype=np.int64)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.tokens += len(tokens)
        self._ends += ends(self._chain, self._chain.lookup(tokens, lengths))
        keys = self._chain.space.of(tokens, lengths)
        least = np.full(len(keys), NOWHERE)
        for level, mask in enumerate(self._chain.space.masks):
            shrunken = keys & mask
            here = self._prefix.least_rows(shrunken)
            if level == 0:
                self._here += self._by_step(here)
            least = np.minimum(least, here)
            for table, _ in self._chain.links[1:]:
                least[table.find(shrunken) > 0] = ALWAYS
            self._within[level] += self._by_step(least)

    def _by_step(self, least: np.ndarray) -> np.ndarray:
        first = np.bincount(np.searchsorted(self._steps, least), minlength=len(self._steps) + 1)
        return np.cumsum(first[:-1])

    def coverage(self, numbers: dict[float, int], cut: bool) -> Coverage:
        here, within = self._here / self.tokens, self._within / self.tokens
        meta, names = self._prefix.meta, _names(self._chain)
        levels = {name: int(count) / self.tokens for name, count in count_levels(self._chain, self._ends).items()}
        kept = []
        for keep, number in numbers.items():
            step, ngrams = int(np.searchsorted(self._steps, number)), self._prefix.ngrams(number)
            shorter = {name: float(within[i, step] - within[i - 1, step]) for i, name in enumerate(names) if i}
            fp16, int8 = (table_bytes(meta, ngrams, dtype) for dtype in ("fp16", "int8"))
            own = float(here[step])
            kept.append(Kept(keep, ngrams, fp16, int8, own, float(within[0, step]) - own, shorter))
        sizes = [table_bytes(meta, self._prefix.ngrams(number), meta.dtype) for number in self._steps.tolist()]
        lines = {name: within[i].tolist() for i, name in enumerate(names)}
        return Coverage(self.tokens, cut, levels, kept, Curve(sizes, here.tolist(), lines))


def _names(chain: Chain) -> list[str]:
    return [f"{tokens}-gram" for tokens in chain.space.window.levels().sum(1).tolist()]


def _read_pieces(store: Store, text: Path, progress: Callable[[int], object] | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a text a few documents at a time, read like a corpus."""
    tokenizer, documents = store.tokenizer(), read_corpus([text], progress)
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode_documents(batch)
        yield np.concatenate(encoded), np.array([len(document) for document in encoded])
