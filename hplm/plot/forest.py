"""All tables of a backbone, and the chains in which a lookup falls back.

Every table owns a range of one address space, so that a row is one number whichever table it lies in and whoever reads it.
Address 0 is the null row of the first table: zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hplm.errors import InvalidInput
from hplm.model.windows import fallbacks
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
    addresses: np.ndarray  # int64, one a token
    levels: np.ndarray  # uint8: how often the window had to shrink


class Chain:
    """A domain's table, its parent's, ... the root's: where a lookup looks, in this order."""

    def __init__(self, links: Sequence[tuple[Table, int]]) -> None:
        self.links = links
        space = links[0][0].space
        self.space = space
        self.masks = [space.mask(keep) for keep in fallbacks(space.n)]

    def lookup(self, windows: np.ndarray) -> Hits:
        """First hit wins: the whole window in every table of the chain, then the shorter one, down to the token alone."""
        whole = self.space.pack(windows)
        addresses = np.zeros(len(whole), dtype=np.int64)
        levels = np.zeros(len(whole), dtype=np.uint8)
        missing = np.arange(len(whole))
        for level, mask in enumerate(self.masks):
            for table, base in self.links:
                rows = table.find(whole[missing] & mask)
                hit = rows > 0
                addresses[missing[hit]] = base + rows[hit]
                levels[missing[hit]] = level
                missing = missing[~hit]
                if not len(missing):
                    return Hits(addresses, levels)
        raise InvalidInput(f"token {int(windows[missing[0], self.space.n // 2]) - 1} is in no table of this chain")

    def holds(self, addresses: np.ndarray) -> bool:
        """Whether every address is a row of this chain's tables: what a reader checks before it trusts a stranger."""
        inside = np.zeros(len(addresses), dtype=bool)
        for table, base in self.links:
            inside |= (addresses >= base) & (addresses < base + table.rows)
        return bool(inside.all())


class Forest:
    def __init__(self, root: Path, branches: Sequence[Branch]) -> None:
        self._links = {(b.domain, b.version): (Table(root / b.folder), b.base) for b in branches}
        self._chains: dict[tuple[str, int], Chain] = {}
        for domain, version in self._links:
            self._chains[domain, version] = Chain(self._path(domain, version))

    def chain(self, domain: str, version: int) -> Chain:
        return self._chains[domain, version]

    @property
    def tables(self) -> list[tuple[Table, int]]:
        return list(self._links.values())

    def _path(self, domain: str, version: int) -> list[tuple[Table, int]]:
        path = []
        step: tuple[str | None, int | None] = (domain, version)
        while step[0] is not None:
            if step not in self._links:
                raise InvalidInput(f"domain {domain!r} version {version} needs {step[0]!r} version {step[1]}: not here")
            path.append(self._links[step])
            meta = path[-1][0].meta
            step = (meta.parent, meta.parent_version)
        return path


def place(tables: Sequence[Table]) -> list[Branch]:
    """Addresses for tables that are exported together."""
    branches, base = [], 0
    for table in tables:
        branches.append(Branch(table.meta.domain, table.meta.version, base))
        base += table.rows
    return branches


def gather(forest: Forest, addresses: np.ndarray, lengths: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Addresses of packed texts' windows -> each token's sum over the windows that cover it, tokens x hidden.

    One `embedding_bag` per table: what lies in another table is the null row there. Where the answer is to be exact (fp32),
    16-bit rows are summed in fp32, which costs about 2.5 times as much; a 16-bit engine takes the fused kernel's 16-bit sum.
    """
    total: Tensor | None = None
    for table, base in forest.tables:
        rows = addresses - base
        mine = (rows > 0) & (rows < table.rows)
        if not mine.any():
            continue
        index = torch.from_numpy(_bags(np.where(mine, rows, NULL), lengths, table.meta.n))
        if dtype == torch.float32:
            part = F.embedding(index, table.values).sum(1, dtype=dtype)
        else:
            part = F.embedding_bag(index, table.values, mode="sum").to(dtype)
        total = part if total is None else total + part
    if total is None:
        table, _ = forest.tables[0]
        return torch.zeros(len(addresses), table.meta.hidden, dtype=dtype)
    return total


def _bags(rows: np.ndarray, lengths: np.ndarray, n: int) -> np.ndarray:
    """For each token the n vectors to add: its own position in the windows of itself and its neighbours in the same text."""
    centre = n // 2
    ends = np.repeat(np.cumsum(lengths), lengths)
    starts = ends - np.repeat(lengths, lengths)
    positions = np.arange(n)
    at = np.arange(len(rows))[:, None] + (centre - positions)
    inside = (at >= starts[:, None]) & (at < ends[:, None])
    neighbours = rows[np.clip(at, 0, len(rows) - 1)]
    return np.where(inside, neighbours * n + positions, NULL)
