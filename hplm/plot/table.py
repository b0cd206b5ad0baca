"""One table on disk: `meta.json`, the index (`starts`, `keys`, `rows`), `values`, and `checksums` with one for each row.

Rows are in order of frequency, length by length, and the lengths lie side by side (builder/tables/ranking.py). Row 0 is zeros
and belongs to no key, so that a missing row can be gathered like any other. A table is written under a temporary name, synced
and renamed. A mapped file never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hplm.errors import Broken
from hplm.plot.index import Index
from hplm.plot.meta import TableMeta

if TYPE_CHECKING:  # lookup, which reads no rows, starts without torch
    from hplm.plot.rows import StoredRows


LOWER = "lower.safetensors"  # beside a decoder's exported table
BranchId = tuple[str, int]  # a domain and its version


@dataclass(frozen=True)
class Branch:
    """A table's domain and version, and its first address."""

    domain: str
    version: int
    base: int
    unique: str = ""  # a part of its folder's name: no name is used twice; an export has none

    @property
    def id(self) -> BranchId:
        return self.domain, self.version

    @property
    def folder(self) -> str:
        """Its folder under `plot/`."""
        return f"{self.domain}/{self.version}{self.unique}"


class Table:
    """An open table. The index and the rows are opened when they are first used."""

    def __init__(self, folder: Path, lower: Path | None = None) -> None:
        """`lower`: the layers that compute what a decoder's table lacks, if they are not in its folder."""
        self.folder = folder
        self.lower = lower or folder / LOWER  # an encoder's do not exist
        self.meta = TableMeta.load(folder / "meta.json")
        self.space = self.meta.space
        for name, size in self.meta.sizes().items():
            file = folder / name
            if (found := file.stat().st_size if file.exists() else 0) != size:
                raise Broken(f"{file} has {found} bytes, but its meta.json says {size}: build or copy the table again")

    @property
    def size(self) -> int:
        """The number of rows, including the null row."""
        return self.meta.rows

    def files(self) -> dict[str, Path]:
        """Returns the files that a copy of the table has, by name."""
        found = {file.name: file for file in sorted(self.folder.iterdir())}
        return found | ({LOWER: self.lower} if self.lower.exists() else {})

    @cached_property
    def index(self) -> Index:
        return Index(self.folder, self.meta.index)

    @cached_property
    def rows(self) -> StoredRows:
        from hplm.plot.rows import StoredRows

        return StoredRows(self.folder, self.meta)

    def verify(self) -> None:
        """Checks all files against their checksums. Raises Broken with the file and the row."""
        _ = self.index
        first = next(self.rows.broken(), None)
        if first is not None:
            raise Broken(f"row {first} of {self.folder / 'values'} does not match its checksum: build or copy the table again")
