"""All tables of a backbone, and the chains in which a lookup falls back.

Every table owns a range of one address space, so that a row is one number whichever table it lies in and whoever reads it.
Address 0 is the null row of the first table: zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hplm.errors import Broken, HplmError, InvalidInput
from hplm.plot.table import Table

NULL = 0


@dataclass(frozen=True)
class Branch:
    """Where a table stands: its folder under `plot/` and the first of its addresses."""

    domain: str
    version: int
    base: int

    @property
    def folder(self) -> str:
        return f"{self.domain}/{self.version}"


@dataclass(frozen=True)
class Hits:
    """What a lookup found, for each token."""

    addresses: np.ndarray  # int64
    tries: np.ndarray  # int64: how many places were tried before, level by level, in each the links of the chain
    chain: int  # links

    @property
    def levels(self) -> np.ndarray:
        """How often the window had to shrink."""
        return self.tries // self.chain

    @property
    def links(self) -> np.ndarray:
        """How far up the chain the table is that has it."""
        return self.tries % self.chain


class Chain:
    """A domain's table, its parent's, ... the root's: where a lookup looks, in this order."""

    def __init__(self, links: Sequence[tuple[Table, int]]) -> None:
        self.links = links
        self.space = links[0][0].space

    def lookup(self, tokens: np.ndarray, lengths: np.ndarray) -> Hits:
        """First hit wins: the whole window in every table of the chain, then the shorter one, down to the token alone."""
        whole, masks = self.space.of(tokens, lengths), self.space.masks
        # All levels at once: a search costs more by the call than by the key.
        keys = (whole & masks[:, None]).reshape(-1, self.space.words)
        found = np.empty((len(masks), len(self.links), len(whole)), dtype=np.int64)
        for link, (table, base) in enumerate(self.links):
            rows = table.find(keys)
            np.add(rows, base, out=rows, where=rows > 0)
            found[:, link] = rows.reshape(len(masks), -1)
        tries = found.reshape(-1, len(whole))  # in the order in which they count
        first = (tries > 0).argmax(0)
        addresses = tries[first, np.arange(len(whole))]
        if not addresses.all():
            raise InvalidInput(f"token {int(tokens[np.flatnonzero(addresses == 0)[0]])} is in no table of this chain")
        return Hits(addresses, first, len(self.links))

    def holds(self, addresses: np.ndarray) -> bool:
        """Whether every address is a row of this chain's tables: what a reader checks before it trusts a stranger."""
        inside = np.zeros(len(addresses), dtype=bool)
        for table, base in self.links:
            inside |= (addresses >= base) & (addresses < base + table.size)
        return bool(inside.all())


class Forest:
    """The tables of one snapshot. What the forest before it had open is shared with it."""

    def __init__(
        self,
        folders: Sequence[Path],
        branches: Iterable[Branch],
        prepare: Callable[[Table], object] = lambda table: None,
        before: Forest | None = None,
    ) -> None:
        """A table that cannot be opened or prepared fails those who need it, by name, and no one else."""
        self.branches = tuple(branches)
        self._tables: dict[Branch, Table | HplmError] = {}
        # Of two by one name the first counts: the other was deleted, and only requests in flight still need it.
        self._by_name = {(branch.domain, branch.version): branch for branch in reversed(self.branches)}
        self._chains: dict[tuple[str, int], Chain] = {}
        for branch in self.branches:
            known = before._tables.get(branch) if before is not None else None
            self._tables[branch] = known if isinstance(known, Table) else _open(folders, branch, prepare)
        ordered = sorted(self.branches, key=lambda branch: branch.base)
        self._bases = [branch.base for branch in ordered]
        self._ordered = ordered

    def chain(self, domain: str, version: int) -> Chain:
        """Raises Broken if a table of the chain is."""
        chain = self._chains.get((domain, version))
        if chain is None:
            chain = self._chains[domain, version] = Chain(self._path(domain, version))
        return chain

    def tables_of(self, addresses: np.ndarray) -> list[tuple[Table, int]]:
        """The tables that some address lies in, with their bases; addresses are those of opened chains."""
        first, last = (bisect_right(self._bases, address) - 1 for address in (addresses.min(), addresses.max()))
        numbers = list(range(first, last + 1))
        if last - first > 1:  # those between need not be met
            numbers = np.unique(np.searchsorted(self._bases, addresses, "right") - 1).tolist()
        return [(self._opened(self._ordered[number]), self._ordered[number].base) for number in numbers]

    def name_of(self, address: int) -> str:
        branch = self._ordered[bisect_right(self._bases, address) - 1]
        return f"row {address - branch.base} of table {branch.folder}"

    def failures(self) -> list[HplmError]:
        return [table for table in self._tables.values() if isinstance(table, HplmError)]

    def _opened(self, branch: Branch) -> Table:
        table = self._tables[branch]
        if isinstance(table, HplmError):
            raise Broken(str(table))
        return table

    def _path(self, domain: str, version: int) -> list[tuple[Table, int]]:
        path = []
        step: tuple[str, int] | None = (domain, version)
        while step is not None:
            branch = self._by_name.get(step)
            if branch is None:
                raise InvalidInput(f"domain {domain!r} version {version} needs {step[0]!r} version {step[1]}: not here")
            table = self._opened(branch)
            path.append((table, branch.base))
            step = table.meta.parent_branch
        return path


def assign_addresses(tables: Iterable[Table], first: int = 0) -> list[Branch]:
    """Addresses for tables, from the first free one on."""
    branches = []
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
                return Broken(f"table {folder / branch.folder} cannot be read: {error}")
    return Broken(f"table {branch.folder} is not in {' or '.join(map(str, folders))}: export or restore it")
