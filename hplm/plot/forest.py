"""All tables of a backbone, and the chains of tables in which a lookup falls back.

Every table owns a range of one address space, so that one number names a row of any table. Address 0 is the null row of the
first table, which is zeros.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.compiled import kernel
from hplm.errors import Broken, HplmError, InvalidInput
from hplm.plot.index import Search
from hplm.plot.table import Branch, Table

NULL = 0


class Hits(NamedTuple):
    """The result of a lookup, for each token."""

    addresses: Array  # int64
    tries: Array  # int64: places tried before the hit: the links of the chain at the first level, then at the next
    chain: int  # number of links: `tries % chain` is that of the table that has the row

    @property
    def levels(self) -> Array:
        """The number of times that the window was shortened."""
        return self.tries // self.chain

    @property
    def whole(self) -> Array:
        """The addresses, but the null row's where no table has the whole window."""
        return np.where(self.levels > 0, NULL, self.addresses)


class Chain:
    """The tables of a domain, its parent and so on to the root, in the order in which a lookup searches them."""

    def __init__(self, links: Sequence[tuple[Table, int]]) -> None:
        self.links = links
        self.domain = links[0][0]
        self.space = self.domain.space

    def lookup(self, tokens: Array, lengths: Array) -> Hits:
        """Returns the first hit of each token's window.

        The whole window is searched in every table of the chain, then the shorter one, down to the token alone.
        """
        find = self.find_by_arrays if self._search is None else self._search.find
        addresses, tries = find(tokens, lengths)
        if np.count_nonzero(addresses) < len(addresses):
            raise InvalidInput(f"token {tokens[addresses == 0][0]} is in no table of this chain")
        return Hits(addresses, tries, len(self.links))

    @cached_property
    def _search(self) -> Search | None:
        compiled = kernel()
        return compiled and Search(compiled, self.space, [(table.index, base) for table, base in self.links])

    def find_by_arrays(self, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """Does what `Search.find` does, without the compiled kernel."""
        whole, masks = self.space.of(tokens, lengths), self.space.masks
        # All levels are searched at once: a search costs more per call than per key.
        keys = (whole & masks[:, None]).reshape(-1, self.space.words)
        found = np.empty((len(masks), len(self.links), len(whole)), dtype=np.int64)
        for link, (table, base) in enumerate(self.links):
            rows = table.index.find(keys)
            np.add(rows, base, out=rows, where=rows > 0)
            found[:, link] = rows.reshape(len(masks), -1)
        tries = found.reshape(-1, len(whole))  # in order of preference
        first = (tries > 0).argmax(0)
        return tries[first, np.arange(len(whole))], first


def count_levels(chain: Chain, found: Array) -> Counter[str]:
    """Adds up the counts by the names of places, of which every one is present, in the order in which a lookup tries them.

    Whole windows are named `domain`, `parent` and `root`, shorter ones `2-gram` and `1-gram`. At the end of a text a window
    has fewer tokens than its level's name says.
    """
    whole = ["domain", *["parent"] * (len(chain.links) - 2), "root"] if len(chain.links) > 1 else ["root"]
    tokens = chain.space.window.levels().sum(1).tolist()
    names = whole + [f"{count}-gram" for count in tokens[1:] for _ in chain.links]
    counts: Counter[str] = Counter(dict.fromkeys(names, 0))
    for name, count in zip(names, found.tolist(), strict=True):
        counts[name] += count
    return counts


def ends(chain: Chain, hits: Hits) -> Array:
    """Returns how many lookups ended at each place, in the order in which a lookup tries them."""
    return np.bincount(hits.tries, minlength=len(chain.space.masks) * len(chain.links))


class Tally:
    """Adds up the counts of several threads until the publisher takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, Chain], Array] = {}

    def add(self, domain: str, chain: Chain, hits: Hits) -> None:
        found = ends(chain, hits)
        with self._lock:
            known = self._found.get((domain, chain))
            self._found[domain, chain] = found if known is None else known + found

    def take(self) -> Counter[tuple[str, str]]:
        """Returns the counts by (domain, level) since the last call."""
        with self._lock:
            taken, self._found = self._found, {}
        counts: Counter[tuple[str, str]] = Counter()
        for (domain, chain), found in taken.items():
            counts.update({(domain, name): count for name, count in count_levels(chain, found).items()})
        return counts


class Forest:
    """The tables of one snapshot. It shares the open tables of the forest before it."""

    def __init__(
        self,
        folders: Sequence[Path],
        branches: Iterable[Branch],
        prepare: Callable[[Table], object] = lambda table: None,
        before: Forest | None = None,
    ) -> None:
        """Opens and prepares the tables. If one fails, only requests that need this table fail, with its name."""
        self.branches = tuple(branches)
        self._tables: dict[Branch, Table | HplmError] = {}
        # If two tables have one name, the first counts. The other was deleted, and only requests in flight need it.
        self._by_name = {branch.id: branch for branch in reversed(self.branches)}
        self._chains: dict[tuple[str, int], Chain] = {}
        for branch in self.branches:
            known = before._tables.get(branch) if before is not None else None
            self._tables[branch] = known if isinstance(known, Table) else _open(folders, branch, prepare)
        ordered = sorted(self.branches, key=lambda branch: branch.base)
        self._bases = [branch.base for branch in ordered]
        self._ordered = ordered

    def chain(self, domain: str, version: int) -> Chain:
        """Returns the chain of a domain. Raises Broken if one of its tables is broken."""
        chain = self._chains.get((domain, version))
        if chain is None:
            chain = self._chains[domain, version] = Chain(self._path(domain, version))
        return chain

    def tables_of(self, addresses: Array) -> list[tuple[Table, int]]:
        """Returns the tables that contain these addresses, with their bases. The addresses belong to opened chains."""
        if len(self._ordered) == 1:
            return [(self._opened(self._ordered[0]), self._ordered[0].base)]
        first, last = (bisect_right(self._bases, address) - 1 for address in (addresses.min(), addresses.max()))
        numbers = list(range(first, last + 1))
        if last - first > 1:  # tables in between may have no address
            numbers = np.unique(np.searchsorted(self._bases, addresses, "right") - 1).tolist()
        return [(self._opened(self._ordered[number]), self._ordered[number].base) for number in numbers]

    def name_of(self, address: int) -> str:
        branch = self._ordered[bisect_right(self._bases, address) - 1]
        return f"row {address - branch.base} of table {branch.folder}"

    def tables(self) -> list[Table]:
        """Returns all tables that could be opened."""
        return [table for table in self._tables.values() if isinstance(table, Table)]

    def failures(self) -> list[HplmError]:
        return [table for table in self._tables.values() if isinstance(table, HplmError)]

    def _opened(self, branch: Branch) -> Table:
        table = self._tables[branch]
        if isinstance(table, HplmError):
            raise Broken(str(table))
        return table

    def _path(self, domain: str, version: int) -> list[tuple[Table, int]]:
        path: list[tuple[Table, int]] = []
        step: tuple[str, int] | None = (domain, version)
        while step is not None:
            branch = self._by_name.get(step)
            if branch is None:
                raise InvalidInput(
                    f"domain {domain!r} version {version} needs domain {step[0]!r} version {step[1]}, which is missing"
                )
            table = self._opened(branch)
            path.append((table, branch.base))
            step = table.meta.parent_branch
        return path


def assign_addresses(tables: Iterable[Table]) -> list[Branch]:
    """Gives the tables ranges of addresses, one after the other."""
    first, branches = 0, list[Branch]()
    for table in tables:
        branches.append(Branch(table.meta.domain, table.meta.version, first))
        first += table.size
    return branches


def _open(folders: Sequence[Path], branch: Branch, prepare: Callable[[Table], object]) -> Table | HplmError:
    for folder in folders:
        if (folder / branch.folder).is_dir():
            try:
                table = Table(folder / branch.folder)
                prepare(table)
                return table
            except HplmError as error:
                return error
            except OSError as error:
                return Broken(f"cannot read table {folder / branch.folder}: {error}")
    return Broken(f"table {branch.folder} is not in {' or '.join(map(str, folders))}: export or restore it")
