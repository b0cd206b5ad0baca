"""Describes a branch: its sizes, its tenants, its frequent n-grams, and how much of a text its table covers.

A table with a smaller `keep` has the first of this one's rows. So the rows of the text's own n-grams give the coverage of
every smaller table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from builder.store.store import Store, TenantVersion
from builder.tables.counts import Counts
from builder.tables.ranking import Ranking, check_keep
from builder.tables.sorted_runs import distinct
from builder.tables.table import table_bytes
from builder.tasks.examples import read_corpus
from hplm.errors import InvalidInput
from hplm.model.windows import ABSENT
from hplm.plot.forest import Chain, count_levels, ends
from hplm.plot.table import Table
from hplm.tenants.listing import branch_row

TEXT_TOKENS = 5_000_000
USUAL_KEEPS = (1.0, 0.004, 0.001, 0.0)  # HMI, Table 5
BATCH_DOCUMENTS = 500
FREQUENT = 20  # n-grams of each length


def built_branches(store: Store) -> list[dict[str, Any]]:
    """Returns every branch of a store with its number of tenants."""
    tenants = Counter((tenant.domain, tenant.domain_version) for tenant in store.readable_tenants())
    return [branch_row(store.meta(*branch), tenants[branch]) for branch in store.domains()]


def inspect_branch(store: Store, domain: str, version: int | None) -> dict[str, Any]:
    """Returns all facts about a branch that need no text. `version`: default is the newest."""
    newest, versions = store.latest(domain), store.versions(domain)
    version = newest if version is None else version
    if version not in versions:
        raise InvalidInput(f"domain {domain!r} has no version {version}: there are {', '.join(map(str, versions))}")
    table = store.table(domain, version)
    meta, sizes = table.meta, table.meta.sizes()
    tenants = store.readable_tenants()
    return {
        "domain": domain,
        "version": version,
        "versions": versions,
        "parent": meta.parent,
        "parent_version": meta.parent_version,
        "window": {"n": meta.n, "causal": meta.causal},
        "ngrams": meta.keys,
        "tokens": meta.corpus_tokens,
        "dtype": meta.dtype,
        "least_cosine": meta.least_cosine,
        "bytes": {
            "values": sizes["values"],
            "index": sum(meta.index.sizes().values()),
            "checksums": sizes["checksums"],
            "row": meta.row_bytes,
            "in_fp16": table_bytes(meta, meta.keys, "fp16"),
            "in_int8": table_bytes(meta, meta.keys, "int8"),
        },
        "users": store.users(tenants)[domain, version],
        "behind": [{"tenant": tenant.id, "version": tenant.domain_version} for tenant in behind(store, domain, tenants)],
        "frequent": frequent(store, table),
    }


def behind(store: Store, domain: str, tenants: Sequence[TenantVersion]) -> list[TenantVersion]:
    """Returns those that use an older version than the newest. Building them again moves them to it."""
    newest = store.latest(domain)
    return [tenant for tenant in tenants if tenant.domain == domain and tenant.domain_version < newest]


def frequent(store: Store, table: Table, top: int = FREQUENT) -> dict[str, list[dict[str, Any]]]:
    """Returns the `top` most frequent n-grams of each length, the longest first."""
    vocabulary = _pieces(store)
    keys = table.index.by_row()
    found: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in range(table.meta.n, 0, -1)}
    for start in range(0, len(keys), 1 << 16):
        windows = table.space.unpack(keys[start : start + (1 << 16)])
        held = (windows != ABSENT).sum(1)
        for tokens, ngrams in found.items():
            for i in np.flatnonzero(held == tokens)[: max(0, top - len(ngrams))].tolist():
                ids = [int(token) - 1 for token in windows[i] if token != ABSENT]
                words = " ".join(vocabulary.get(token, f"<{token}>") for token in ids)
                ngrams.append({"row": start + i + 1, "tokens": ids, "words": words})
        if all(len(ngrams) >= top for ngrams in found.values()):
            break
    return {f"{tokens}-gram": ngrams for tokens, ngrams in found.items()}


def _pieces(store: Store) -> dict[int, str]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str((store.folder / "tokenizer.json").read_text("utf-8")).get_vocab()
    return {token: piece for piece, token in vocabulary.items()}


@dataclass(frozen=True)
class SmallerTable:
    """A table of this branch with another `keep`, and the shares of a text's windows that are found where."""

    keep: float
    ngrams: int
    fp16_bytes: int
    int8_bytes: int
    here: float  # the whole window, in this table
    above: float  # the whole window, in a parent or the root
    shorter: dict[str, float]


@dataclass(frozen=True)
class Coverage:
    tokens: int
    cut: bool  # the text was longer than what was read
    levels: dict[str, float]  # of the actual table
    kept: list[SmallerTable]

    @property
    def rows(self) -> list[dict[str, str]]:
        """Returns what there is to know of each table of `kept`, as words."""
        return [
            {"keep": f"{kept.keep:.3%}", "n-grams": f"{kept.ngrams:,}", "MB fp16": mb(kept.fp16_bytes),
             "MB int8": mb(kept.int8_bytes), "here": f"{kept.here:.2%}", "above": f"{kept.above:.2%}",
             **{name: f"{share:.2%}" for name, share in kept.shorter.items()}}
            for kept in self.kept
        ]  # fmt: skip


def mb(size: float) -> str:
    """Returns bytes in megabytes, as words."""
    megabytes = size / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 100 else f"{megabytes:.3g}"


Pieces = Iterator[tuple[np.ndarray, np.ndarray]]  # tokens and lengths of some documents


def cover(store: Store, domain: str, version: int, pieces: Pieces, keeps: Sequence[float] | None = None) -> Coverage:
    """Looks texts up. `keeps`: default are those of HMI's Table 5 that this table includes, and its own."""
    chain = store.forest(domain, version).chain(domain, version)
    meta, root = chain.links[0][0].meta, chain.links[0][0].meta.parent is None
    ranking = Ranking(Counts(store.counts_folder(domain, version)), root)
    own = ranking.keep_for(meta.keys)
    if keeps is None:
        by_size = {ranking.size(keep): keep for keep in (own, *USUAL_KEEPS)}
        keeps = [keep for size, keep in by_size.items() if size <= meta.keys]
    for keep in keeps:
        check_keep(keep)
        if (size := ranking.size(keep)) > meta.keys:
            raise InvalidInput(
                f"keep {keep:g} is {size:,} n-grams, and the table of {domain!r} has {meta.keys:,}: choose less, or build it "
                "with more --keep"
            )
    steps = sorted({*keeps})
    tokens, cut, looked, windows = 0, False, np.zeros(len(chain.space.masks) * len(chain.links), dtype=np.int64), []
    for piece, lengths in pieces:
        if cut := tokens >= TEXT_TOKENS:
            break
        tokens += len(piece)
        looked += ends(chain, chain.lookup(piece, lengths))
        windows.append(chain.space.of(piece, lengths))
    here, within = _found(chain, root, np.array([ranking.number(keep) for keep in steps]), np.concatenate(windows))
    names = [f"{tokens}-gram" for tokens in chain.space.window.levels().sum(1).tolist()]
    kept = []
    for keep in keeps:
        step, ngrams = steps.index(keep), ranking.size(keep)
        shorter = {name: float(within[i, step] - within[i - 1, step]) for i, name in enumerate(names) if i}
        fp16, int8 = (table_bytes(meta, ngrams, dtype) for dtype in ("fp16", "int8"))
        kept.append(SmallerTable(keep, ngrams, fp16, int8, float(here[step]), float(within[0, step] - here[step]), shorter))
    levels = {name: int(count) / tokens for name, count in count_levels(chain, looked).items()}
    return Coverage(tokens, cut, levels, kept)


def _found(chain: Chain, root: bool, numbers: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns by table the share of windows that it has whole, and by level and table those found anywhere at this level.

    `numbers`: how many of the first rows each table has. A root has all single tokens beside them.
    """
    keys, window_of = distinct(windows)
    times = np.bincount(window_of, minlength=len(keys))
    least, here, within = np.full(len(keys), len(numbers)), np.zeros(len(numbers)), []

    def shares(first: np.ndarray) -> np.ndarray:
        return np.cumsum(np.bincount(first, times, len(numbers) + 1)[:-1]) / len(windows)

    for level, mask in enumerate(chain.space.masks):
        shrunken, which = distinct(keys & mask)
        (own, *above), alone = (table.index.find(shrunken) for table, _ in chain.links), chain.space.masks[-1]
        first = np.where(own > 0, np.searchsorted(numbers, own), len(numbers))  # the first of the tables that has the key
        if root:
            first[((shrunken & alone) == shrunken).all(1)] = 0
        if level == 0:
            here = shares(first[which])
        for rows in above:
            first[rows > 0] = 0
        least = np.minimum(least, first[which])
        within.append(shares(least))
    return here, np.array(within)


def read_pieces(store: Store, text: Path, progress: Callable[[int], object] | None = None) -> Pieces:
    """Yields a text a few documents at a time, read like a corpus."""
    tokenizer, documents = store.tokenizer(), read_corpus([text], progress)
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        yield _joined(tokenizer.encode_documents(batch))


def _joined(documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(documents), np.array([len(document) for document in documents])
